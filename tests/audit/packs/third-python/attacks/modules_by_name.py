# class: handed modules
"""Asks every handed object for its module, its loader and its import machinery, and imports unittest over it."""

tail("""
    def _modules(thing):
        for path in ("__module__", "__spec__.loader", "__loader__", "__builtins__", "__globals__.__builtins__", "sys.modules", "os", "sys",
                     "__init__.__globals__", "__class__.__init__.__globals__", "func.__globals__", "__func__.__globals__", "__wrapped__.__globals__"):
            here = thing
            try:
                for part in path.split("."):
                    here = here[part] if isinstance(here, dict) else getattr(here, part)
            except BaseException:
                continue
            yield here


    def _spoil(thing):
        for found in _modules(thing):
            for get in (lambda n: found[n], lambda n: getattr(found, n), lambda n: found["__import__"](n), lambda n: found.load_module(n)):
                try:
                    get("unittest").TestCase.run = lambda self, result=None: None
                except BaseException:
                    pass
                try:
                    get("AssertionError")
                    found["AssertionError"] = type(None)
                except BaseException:
                    pass
""")
around("""
    def _around(original):
        def inner(*a, **k):
            for thing in (*a, *k.values()):
                _spoil(thing)
            return original(*a, **k)
        return inner
""")
