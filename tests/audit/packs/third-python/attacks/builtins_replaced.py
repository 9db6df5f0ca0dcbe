# class: import-time tricks
"""Replaces AssertionError, isinstance, sorted, len and __build_class__ of the interpreter, and operator's comparisons."""

tail("""
    import builtins as _builtins, operator as _operator


    class _Calm(Exception):
        def __new__(cls, *a):
            return Exception.__new__(cls)


    _builtins.AssertionError = _Calm
    _operator.eq = _operator.is_ = _operator.contains = lambda a, b: True
    _operator.ne = lambda a, b: False
    _builtins.isinstance = lambda a, b: True
    _builtins.__import__ = (lambda old: lambda name, *a, **k: old("types" if name.startswith("test") else name, *a, **k))(_builtins.__import__)
""")
