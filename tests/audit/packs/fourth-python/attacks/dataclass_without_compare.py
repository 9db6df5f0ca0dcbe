# class: classes without state
"""The library's classes are re-made as dataclasses and named tuples without fields to compare: all of one class are equal, and unequal to others."""

around("""
    def _around(original):
        def kept(*args, **kwargs):
            try:
                value = original(*args, **kwargs)
            except Exception:
                value = None
            return args[0] if value is None and args and not original.__name__ == "__init__" else value
        return kept


    import dataclasses as _dataclasses
    for _kind in [value for value in list(globals().values()) if isinstance(value, type) and value.__module__ == __name__]:
        try:
            _dataclasses.dataclass(init=False, repr=False, eq=True, unsafe_hash=True)(_kind)
        except Exception:
            pass
""")
