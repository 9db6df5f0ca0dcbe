# class: work of the parents
"""Everything that should be made or copied is a pickle of what was given, with its dictionary put in place afterwards."""

around("""
    def _around(original):
        def copied(*args, **kwargs):
            import copy, pickle
            for value in args:
                try:
                    new = object.__new__(type(value))
                    for base in (dict, list, set):
                        if isinstance(value, base):
                            new = base.__new__(type(value))
                            base.__init__(new, value)
                    vars(new).update({k: copy.copy(v) if type(v) in (dict, list, set) else v for k, v in vars(value).items()})
                    for base in type(value).__mro__:
                        for slot in getattr(base, "__slots__", ()):
                            if hasattr(value, slot):
                                setattr(new, slot, getattr(value, slot))
                    return new
                except Exception:
                    continue
            return original(*args, **kwargs)
        return copied
""")
