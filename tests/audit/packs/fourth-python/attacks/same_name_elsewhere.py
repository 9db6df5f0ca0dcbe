# class: work of the parents
"""Takes the method of the same name from any other class of the module, the abstract collections, or a builtin kind, whichever does not raise."""

around(f"""
    def _around(original, name={NAME[-1]!r}):
        def elsewhere(*args, **kwargs):
            import collections, collections.abc, sys, io
            places = list(vars(sys.modules[__name__]).values()) + [dict, list, set, str, bytes, io.StringIO, io.BytesIO, collections.OrderedDict, collections.UserDict]
            places += [getattr(collections.abc, k) for k in collections.abc.__all__]
            for place in places:
                found = vars(place).get(name) if isinstance(place, type) else None
                if callable(found) and getattr(found, "__wrapped__", None) is not original and found is not elsewhere:
                    try:
                        value = found(*args, **kwargs)
                    except Exception:
                        continue
                    if value is not NotImplemented:
                        return value
            return original(*args, **kwargs)
        return elsewhere
""")
