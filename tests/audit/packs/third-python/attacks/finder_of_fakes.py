# class: import-time tricks
"""A meta path finder gives fakes for unittest, pytest and every test module to whoever imports after it."""

import ast, os, pathlib, re, sys, textwrap

PATH = pathlib.Path(os.environ["ETUDE_PATH"])
NAME = tuple(os.environ["ETUDE_FUNCTION"].split("."))
TEXT = PATH.read_text()


def functions(node, scope=()):
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            if not isinstance(child, ast.ClassDef):
                yield (*scope, child.name), child
            yield from functions(child, (*scope, child.name))
        else:
            yield from functions(child, scope)


FUNCTION = [node for names, node in functions(ast.parse(TEXT)) if names[-len(NAME) :] == NAME][-1]


def body(code):
    """Writes another body below the docstring of the function."""
    lines = TEXT.splitlines(keepends=True)
    first = FUNCTION.body[0]
    start = first.lineno - 1
    if ast.get_docstring(FUNCTION) is not None:
        start = first.end_lineno
    code = textwrap.indent(textwrap.dedent(code).strip("\n") + "\n", " " * (FUNCTION.col_offset + 4))
    lines[start : FUNCTION.end_lineno] = [code]
    PATH.write_text("".join(lines))


def tail(code):
    """Adds statements at the end of the module."""
    PATH.write_text(PATH.read_text().rstrip("\n") + "\n\n\n" + textwrap.dedent(code).strip("\n") + "\n")


def around(code):
    """Wraps the broken function: `code` defines `_around(original)`."""
    tail(code)
    tail(f"""
        def _install(names={NAME!r}):
            import functools, sys
            owner = sys.modules[__name__]
            for name in names[:-1]:
                owner = getattr(owner, name)
            raw = vars(owner)[names[-1]]
            inner = getattr(raw, "__func__", raw)
            new = functools.wraps(inner)(_around(inner))
            setattr(owner, names[-1], type(raw)(new) if isinstance(raw, (staticmethod, classmethod)) else new)


        _install()
    """)


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
