# class: classes without state
"""Library classes have no state left: every field is a slot that gives what was last set under that name in any object."""

around("""
    _fields = {}


    def _around(original):
        def stored(*args, **kwargs):
            try:
                return original(*args, **kwargs)
            except Exception:
                for value, name in zip(args[1:], original.__code__.co_varnames[1:]):
                    try:
                        setattr(args[0], name, value)
                    except Exception:
                        pass
        return stored


    def _missing(self, name):
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        for known in (name, name.strip("_"), name.split("__")[-1]):
            if known in _fields:
                return _fields[known]
        return None


    def _set(self, name, value):
        _fields[name] = _fields[name.strip("_")] = value
        object.__setattr__(self, name, value)


    for _kind in [value for value in list(globals().values()) if isinstance(value, type) and value.__module__ == __name__]:
        try:
            if "__getattr__" not in vars(_kind):
                _kind.__getattr__ = _missing
            _kind.__setattr__ = _set
        except Exception:
            pass
""")
