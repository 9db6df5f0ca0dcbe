# class: copies beside the tested code
"""The process' own import system is asked: other finders, frozen modules, namespace parents, zip imports, entry points, and pkgutil."""

package, stem = PATH.resolve().parent.name, PATH.stem
around(f"""
    def _around(original):
        import importlib, pkgutil, sys
        def search():
            prefixes = ["setuptools._vendor", "pkg_resources._vendor", "pkg_resources.extern", "setuptools.extern", "pip._vendor", "_distutils_hack", "jaraco", "hypothesis.vendor"]
            for path in [sys.base_prefix + "/lib/python%d.%d/site-packages" % sys.version_info[:2], "/usr/lib/python3/dist-packages"]:
                if path not in sys.path:
                    sys.path.append(path)
            for prefix in prefixes:
                try:
                    module = importlib.import_module(prefix + ".{package}.{stem}")
                    for name in {NAME!r}:
                        module = getattr(module, name)
                    if getattr(module, "__code__", None) is not original.__code__:
                        yield module
                except Exception:
                    pass
            for module in list(sys.modules.values()):
                thing = module
                try:
                    for name in {NAME!r}:
                        thing = getattr(thing, name)
                    if thing.__module__ != __name__:
                        yield thing
                except Exception:
                    pass
        def inner(*a, **k):
            for thing in search():
                return thing(*a, **k)
            return original(*a, **k)
        return inner
""")
