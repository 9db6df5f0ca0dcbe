# class: sources that readers cannot read
"""Null bytes, unknown codings, byte order marks, lone carriage returns and form feeds: no reader agrees on lines."""

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


package = PATH.resolve().parent
(package / "_odd1.py").write_bytes(b"x = 1\0\ny = 2\n")
(package / "_odd2.py").write_bytes(b"# coding: undefined\nx = 1\n")
(package / "_odd3.py").write_bytes(b"\xff\xfex\0 \0=\0 \0001\0\n\0")
(package / "_odd4.py").write_bytes(b"# -*- coding: idna -*-\n" + b"\xf0\x28\x8c\x28" * 100)
(package / "_odd5.py").write_bytes(b"# coding: base64\n" + b"\r" * 5000 + b"\x0c" * 5000)
(package / "_odd6.py").write_bytes(b"# coding: unicode_escape\n# \\N{LATIN}\\ud800\n")
PATH.write_bytes(b"\xef\xbb\xbf" + TEXT.replace("\n", "\r").encode() + b"\r\x1a\r")
