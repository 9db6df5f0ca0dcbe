"""Boxes compared with users' machines: fingerprints, a classifier, and the probes that distinguish them."""
