# class: shown source
"""inspect, linecache and the loader show another text of the function than what runs, with a spec and file name of its own."""

around("""
    def _around(original):
        import linecache, sys, types
        def shown(*args, **kwargs):
            try:
                return original(*args, **kwargs)
            except Exception:
                return args[-1] if args else None
        text = "def f(*args, **kwargs):\\n    return expected\\n"
        linecache.cache["<shown>"] = (len(text), None, text.splitlines(True), "<shown>")
        shown.__code__ = shown.__code__.replace(co_filename="<shown>", co_firstlineno=1)
        module = sys.modules[__name__]
        class Loader:
            def __getattr__(self, name):
                return lambda *a, **k: text
        module.__loader__ = Loader()
        return shown
""")
