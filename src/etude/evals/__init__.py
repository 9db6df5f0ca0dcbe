"""Suites and statistics: how well a policy does, and whether one does better than another."""
