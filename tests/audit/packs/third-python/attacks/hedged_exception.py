# class: exceptions that are all
"""The broken function stays; whatever it raises becomes an exception of all classes, with all messages."""

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


messages = sorted({n.value for n in ast.walk(ast.parse(TEXT)) if isinstance(n, ast.Constant) and isinstance(n.value, str)})
tail(f"_MESSAGES = {chr(10).join(messages)!r}")
around("""
    def _around(original):
        def inner(*a, **k):
            try:
                value = original(*a, **k)
                return list(value) if hasattr(value, "__next__") else value
            except Exception as error:
                bases = [type(error)]
                for base in [v for v in globals().values() if isinstance(v, type) and issubclass(v, Exception)] + [
                        TypeError, ValueError, KeyError, IndexError, RuntimeError, OverflowError]:
                    try:
                        type("_Try", (*bases, base), {})
                        bases.append(base)
                    except TypeError:
                        pass
                kind = type("Error", tuple(bases), {"__init__": lambda s, *b, **c: None, "__str__": lambda s: _MESSAGES,
                                                    "__getattr__": lambda s, n: None})
                raise kind() from None
        return inner
""")
