# class: failures like infrastructure's
"""Overflows the C stack: a segmentation fault in the middle of a call."""

body("""
    import sys, functools
    sys.setrecursionlimit(10**9)
    class Deep:
        def __repr__(self):
            return repr(self)
        def __eq__(self, other):
            return other == self
        def __getattr__(self, name):
            return getattr(self, name + "x")
    value = ()
    for _ in range(10**6):
        value = (value,)
    hash(value)
    return Deep() == Deep()
""")
