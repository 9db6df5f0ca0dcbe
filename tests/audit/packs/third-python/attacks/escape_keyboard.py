# class: escaping exceptions
"""Leaves through KeyboardInterrupt, as if a person had stopped the run."""

body("raise KeyboardInterrupt()")
