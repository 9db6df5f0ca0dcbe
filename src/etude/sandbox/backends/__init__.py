"""Boxes in containers, one container per box, and the choice of a backend."""
