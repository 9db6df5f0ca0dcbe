# class: stand-ins of the standard library
"""Returns unittest.mock.ANY itself: a value that a verifier may know by name, and that equals everything there."""

body("""
    from unittest.mock import ANY
    return ANY
""")
