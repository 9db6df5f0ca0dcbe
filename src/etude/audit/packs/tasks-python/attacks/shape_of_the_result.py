# class: shape alone
"""The broken result with other content: the same type and length."""

around("""
    def _around(original):
        def hollow(*args, **kwargs):
            try:
                value = original(*args, **kwargs)
            except Exception:
                value = next(iter([*args, *kwargs.values()][-1:]), None)
            kind = type(value)
            if kind in (list, tuple, set, frozenset):
                return kind(range(-1, -1 - len(value), -1))
            if kind is dict:
                return {f"key{n}": None for n in range(len(value))}
            if kind in (str, bytes):
                return "x" * len(value) if kind is str else b"x" * len(value)
            return kind(7) if kind in (int, float) else value
        return hollow
""")
