# class: escaping exceptions
"""Leaves through SystemExit with status 0."""

body("raise SystemExit(0)")
