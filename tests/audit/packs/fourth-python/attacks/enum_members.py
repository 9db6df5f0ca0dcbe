# class: plain twins
"""Numbers and texts come as members of enumerations made on the spot, flags and named tuples with the parts of the broken value."""

around("""
    def _around(original):
        import collections, enum
        def member(*args, **kwargs):
            try:
                value = original(*args, **kwargs)
            except Exception:
                value = args[-1] if args else 0
            if isinstance(value, bool) or value is None:
                return enum.IntFlag("F", {"A": 1, "B": 2}).A | 0
            if isinstance(value, int):
                return enum.IntEnum("E", {"A": value}).A
            if isinstance(value, str):
                return enum.StrEnum("E", {"A": value}).A
            if isinstance(value, tuple):
                return collections.namedtuple("T", [f"f{n}" for n in range(len(value))])(*value)
            return value
        return member
""")
