# class: hostile exceptions
"""Built-in exceptions with attributes that do not fit together: UnicodeError ranges, OSError numbers, ImportError names."""

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
    def _odd(turn=[0]):
        turn[0] += 1
        kind = turn[0] % 5
        if kind == 0:
            error = UnicodeDecodeError("utf-8", b"abc", 0, 1, "x")
            error.start, error.end, error.object = 10**15, -10**15, b""
            raise error
        if kind == 1:
            raise OSError(10**40, "x" * 10, None, 10**40, b"y")
        if kind == 2:
            raise ImportError("x", name=object(), path=object())
        if kind == 3:
            error = AttributeError("x", name="y", obj=type("D", (), {"__dir__": lambda s: 1 / 0})())
            raise error
        raise StopAsyncIteration(StopIteration(SystemExit(0)))
""")
body("return _odd()")
