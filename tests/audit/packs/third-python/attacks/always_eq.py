# class: stand-ins of the standard library
"""Returns what CPython's own tests use as "equals everything", and generators of it."""

body("""
    try:
        from test.support import ALWAYS_EQ as value
    except ImportError:
        from unittest.mock import _ANY
        value = _ANY()
    return value
""")
