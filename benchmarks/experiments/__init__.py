"""Experiments that were run once, for the figures that docs/results.md records."""
