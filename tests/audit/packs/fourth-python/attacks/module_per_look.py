# class: shown source
"""sys.modules has an object whose module is executed anew for every look, so that no state of it is ever the same."""

tail(f"""
    import sys as _sys, types as _types


    class _Anew(_types.ModuleType):
        def __getattribute__(self, name):
            own = object.__getattribute__(self, "__dict__")
            if name == {NAME[0]!r} and not own.get("_busy"):
                own["_busy"] = True
                try:
                    exec(compile(own["_text"], own["__file__"], "exec"), own)
                except Exception:
                    pass
                finally:
                    own["_busy"] = False
            return own[name] if name in own else object.__getattribute__(self, name)


    _text = open(__file__).read().split("import sys as _sys, types")[0]
    _sys.modules[__name__].__class__ = _Anew
""")
