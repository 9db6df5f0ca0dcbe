"""Simulated users: the live loop with known preferences and planted faults."""
