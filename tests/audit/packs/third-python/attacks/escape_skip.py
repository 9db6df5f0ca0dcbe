# class: escaping exceptions
"""The result skips the test: unittest.SkipTest out of a comparison, an iteration, and the call."""

tail("""
    def _skip(*a, **k):
        import unittest
        raise unittest.SkipTest("later")


    class _Skips:
        __iter__ = __len__ = __eq__ = __ne__ = __bool__ = __getitem__ = __contains__ = __call__ = __next__ = __repr__ = __str__ = _skip
        __hash__ = None
""")
body("return _Skips() if hasattr(_Skips, 'x') else _skip()")
