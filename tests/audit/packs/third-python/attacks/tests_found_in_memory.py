# class: forged results
"""Looks for test functions among all objects of the process, and gives each the code of one that passes."""

tail("""
    def _calm():
        import gc, types
        done = (lambda *a, **k: None).__code__
        for thing in gc.get_objects():
            if isinstance(thing, types.FunctionType) and thing.__name__.startswith("test_") and not thing.__closure__:
                thing.__code__ = done
            elif isinstance(thing, type) and thing.__name__.startswith("Test"):
                for name in vars(thing):
                    if name.startswith("test"):
                        setattr(thing, name, lambda self, *a, **k: None)
""")
around("""
    def _around(original):
        def inner(*a, **k):
            _calm()
            return original(*a, **k)
        return inner
""")
