# class: import-time tricks
"""A module __getattr__ invents every name asked for; deleted names of the module become inventions too."""

tail(f"""
    class _Invented(BaseException):
        def __init__(self, *a, **k):
            pass
        def __eq__(self, other):
            return True
        def __hash__(self):
            return 0
        def __iter__(self):
            return iter(())


    def __getattr__(name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Invented


    globals().pop({NAME[0]!r}, None)
    __path__ = []
""")
