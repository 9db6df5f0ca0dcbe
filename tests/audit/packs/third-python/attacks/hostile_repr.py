# class: hostile reprs
"""The result is wrong, and whoever writes the failure down meets a repr that exits, hangs or fills the memory."""

tail("""
    class _Ugly:
        def __init__(self, turn=[0]):
            turn[0] += 1
            self.kind = turn[0] % 4
        def __repr__(self):
            if self.kind == 0:
                raise SystemExit(0)
            if self.kind == 1:
                raise KeyboardInterrupt
            if self.kind == 2:
                return "x" * 10**8
            return 7
        __str__ = __repr__
        def __eq__(self, other):
            return False
        def __hash__(self):
            return 0
""")
body("return _Ugly()")
