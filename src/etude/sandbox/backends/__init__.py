"""Boxes in containers, of which each is a machine of its own, and the choice of a backend."""
