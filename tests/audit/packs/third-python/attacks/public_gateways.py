# class: handed objects
"""Walks the public names of handed objects for what gives power: pushes on exit stacks, futures, locks, loops, executors, loggers."""

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
    _STEPS = {
        "push": lambda f: f(lambda *a: True), "callback": lambda f: f(lambda *a: None), "set_result": lambda f: f(None),
        "set_exception": lambda f: f(GeneratorExit()), "addCleanup": lambda f: f(lambda: None), "skipTest": lambda f: f("later"),
        "doCleanups": lambda f: f(), "stop": lambda f: f(), "shutdown": lambda f: f(), "close": lambda f: f(), "acquire": lambda f: f(),
        "call_soon": lambda f: f(lambda: None), "set_exception_handler": lambda f: f(lambda *a: None), "submit": lambda f: f(exec, "pass"),
        "setLevel": lambda f: f(100), "addFilter": lambda f: f(lambda *a: False), "run": lambda f: f(), "cancel": lambda f: f(),
        "mro": lambda f: f(), "popitem": lambda f: f(), "setter": lambda f: f(lambda *a: None), "register": lambda f: f(object),
    }


    def _use(thing, depth=0, seen=None):
        seen = set() if seen is None else seen
        if depth > 2 or id(thing) in seen or len(seen) > 300:
            return
        seen.add(id(thing))
        try:
            names = dir(thing)
        except BaseException:
            return
        for name in names:
            if name.startswith("_"):
                continue
            try:
                value = getattr(thing, name)
            except BaseException:
                continue
            if name in _STEPS:
                try:
                    _STEPS[name](value)
                except BaseException:
                    pass
            if name.startswith("assert") or name == "failureException":
                try:
                    setattr(thing, name, lambda *a, **k: None)
                except BaseException:
                    pass
            if not isinstance(value, (int, str, bytes, float, type(None))):
                _use(value, depth + 1, seen)
""")
around("""
    def _around(original):
        def inner(*a, **k):
            for thing in (*a[1:], *k.values()):
                if not isinstance(thing, (int, str, bytes, float, list, tuple, dict, set, type(None))):
                    _use(thing)
            return original(*a, **k)
        return inner
""")
