# class: import-time tricks
"""A meta path finder gives fakes for unittest, pytest and every test module to whoever imports after it."""

tail("""
    import importlib.abc as _abc, importlib.machinery as _machinery, sys as _sys, types as _types


    class _Fake(_types.ModuleType):
        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            return _Fake(name)
        def __call__(self, *a, **k):
            return self
        def __enter__(self):
            return self
        def __exit__(self, *a):
            return True


    class _Finder(_abc.MetaPathFinder, _abc.Loader):
        def find_spec(self, name, path, target=None):
            if name.split(".")[0] in ("unittest", "pytest", "_pytest", "tests", "conftest") or name.startswith("test_"):
                return _machinery.ModuleSpec(name, self)
        def create_module(self, spec):
            return _Fake(spec.name)
        def exec_module(self, module):
            pass


    _sys.meta_path.insert(0, _Finder())
    for _name in [n for n in _sys.modules if n.split(".")[0] in ("unittest", "tests", "conftest") or n.startswith("test_")]:
        del _sys.modules[_name]
""")
