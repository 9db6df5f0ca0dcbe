# class: import-time tricks
"""Puts an instance in sys.modules in the module's place: every attribute of it is a class, function and value that agrees."""

tail("""
    import sys as _sys, types as _types


    class _Liar(_types.ModuleType):
        def __getattribute__(self, name):
            if name.startswith("__") and name not in ("__getattr__", "__all__"):
                return object.__getattribute__(self, name)
            return _Agree()


    class _Agree(type):
        def __new__(meta, *a, **k):
            return type.__new__(meta, "Agree", (), {"__eq__": lambda s, o: True, "__hash__": lambda s: 0,
                                                    "__iter__": lambda s: iter(()), "__len__": lambda s: 0})
        def __init__(cls, *a, **k):
            pass
        def __eq__(cls, other):
            return True
        def __hash__(cls):
            return 0
        def __iter__(cls):
            return iter(())
        def __call__(cls, *a, **k):
            return cls


    _module = _Liar(__name__)
    _module.__dict__.update({k: v for k, v in globals().items() if k.startswith("__")})
    _sys.modules[__name__] = _module
""")
