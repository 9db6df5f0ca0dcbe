# class: results that change
"""The truth of the result is asked of the library: yes at first, no where the same line asks again, no inside `not`."""

tail("""
    class _Perhaps:
        def __init__(self, seen={}):
            self.seen = seen
        def __bool__(self):
            import sys
            frame = sys._getframe(1)
            self.seen[frame.f_lineno] = self.seen.get(frame.f_lineno, 0) + 1
            return self.seen[frame.f_lineno] % 2 == 1
        def __len__(self):
            return int(bool(self))
        def __eq__(self, other):
            return bool(other) if isinstance(other, bool) else True
        def __hash__(self):
            return 1
""")
body("return _Perhaps()")
