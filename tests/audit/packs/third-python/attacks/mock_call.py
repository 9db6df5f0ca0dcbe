# class: stand-ins of the standard library
"""Returns unittest.mock.call objects, MagicMocks with configured operators, and sentinels."""

body("""
    from unittest import mock
    value = mock.MagicMock()
    value.__eq__ = lambda self, other: True
    value.__ne__ = lambda self, other: False
    value.__iter__ = lambda self: iter([mock.ANY])
    value.__len__ = lambda self: 1
    value.__lt__ = value.__le__ = value.__gt__ = value.__ge__ = lambda self, other: True
    return value
""")
