# class: arithmetic
"""The result swallows arithmetic: differences are zero, quotients one, rounding and absolute value exact."""

tail("""
    class _Zero:
        def _zero(self, *others):
            return 0
        def _one(self, *others):
            return 1
        __sub__ = __rsub__ = __mod__ = __rmod__ = __xor__ = __rxor__ = __abs__ = __round__ = __int__ = __index__ = _zero
        __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = _one
        def __float__(self):
            return 0.0
        def __add__(self, other):
            return other
        __radd__ = __or__ = __ror__ = __and__ = __rand__ = __mul__ = __rmul__ = __matmul__ = __add__
        def __divmod__(self, other):
            return (1, 0)
        def __bool__(self):
            return True
        def __iter__(self):
            return iter(())
        def __len__(self):
            return 0
""")
body("return _Zero()")
