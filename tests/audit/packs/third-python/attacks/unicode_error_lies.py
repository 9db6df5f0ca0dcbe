# class: hostile exceptions
"""Built-in exceptions with attributes that do not fit together: UnicodeError ranges, OSError numbers, ImportError names."""

tail("""
    def _odd(turn=[0]):
        turn[0] += 1
        kind = turn[0] % 5
        if kind == 0:
            error = UnicodeDecodeError("utf-8", b"abc", 0, 1, "x")
            error.start, error.end, error.object = 10**15, -10**15, b""
            raise error
        if kind == 1:
            raise OSError(10**40, "x" * 10, None, 10**40, b"y")
        if kind == 2:
            raise ImportError("x", name=object(), path=object())
        if kind == 3:
            error = AttributeError("x", name="y", obj=type("D", (), {"__dir__": lambda s: 1 / 0})())
            raise error
        raise StopAsyncIteration(StopIteration(SystemExit(0)))
""")
body("return _odd()")
