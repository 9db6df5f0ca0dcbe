# class: hostile reprs
"""A repr that never comes back, in lists and keys of the result."""

tail("""
    class _Slow:
        def __repr__(self):
            import time
            while True:
                time.sleep(1000)
        __str__ = __format__ = __fspath__ = __repr__
        def __hash__(self):
            return 0
        def __eq__(self, other):
            return self is other
""")
body("return [_Slow(), {_Slow(): _Slow()}]")
