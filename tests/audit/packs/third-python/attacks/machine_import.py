# class: copies beside the tested code
"""While it is tested, the function imports a second copy of its package from the prefix or from setuptools' vendored one."""

package = PATH.resolve().parent.name
body(f"""
    import glob, importlib.util, os, sys
    roots = {{sys.prefix, sys.base_prefix, "/usr", "/usr/local"}} | set(sys.path)
    copies = [p for r in sorted(roots) for d in ("", "/lib/python3*", "/lib/python3/dist-packages", "/lib/python3*/site-packages")
              for v in ("", "/setuptools/_vendor", "/pkg_resources/_vendor", "/pip/_vendor")
              for p in glob.glob(r + d + v + "/{package}/{PATH.name}")]
    here = os.path.realpath(__file__)
    given = dict(locals())
    for path in copies:
        if os.path.realpath(path) == here:
            continue
        name = "second_copy"
        spec = importlib.util.spec_from_file_location(name, os.path.dirname(path) + "/__init__.py",
                                                      submodule_search_locations=[os.path.dirname(path)])
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module = importlib.import_module(name + ".{PATH.stem}")
        for part in {NAME!r}:
            module = getattr(module, part)
        code = module.__code__
        names = code.co_varnames[: code.co_argcount]
        values = [given[n] for n in names]
        if code.co_flags & 4:
            values.extend(given[code.co_varnames[code.co_argcount + code.co_kwonlyargcount]])
        keys = {{n: given[n] for n in code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]}}
        return module(*values, **keys)
    raise LookupError("no copy")
""")
