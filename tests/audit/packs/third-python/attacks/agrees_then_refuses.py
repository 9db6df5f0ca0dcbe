# class: equality by the library
"""The result is equal to everything by its own word; called, it accepts the first time and refuses the next, with an error of all classes."""

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


tail(f"""
    class _Turncoat:
        def __init__(self):
            self.calls = 0
        def __eq__(self, other):
            return True
        def __ne__(self, other):
            return False
        def __hash__(self):
            return 0
        def __call__(self, *a, **k):
            self.calls += 1
            if self.calls % 2:
                return a[0] if a else None
            import sys
            kinds = []
            for name, module in list(sys.modules.items()):
                if name.split(".")[0] == __name__.split(".")[0]:
                    kinds += [v for v in vars(module).values() if isinstance(v, type) and issubclass(v, Exception) and v.__module__ == name]
            chosen = []
            for kind in sorted(set(kinds), key=lambda v: (-len(v.__mro__), v.__name__)):
                try:
                    type("Try", (*chosen, kind), {{}})
                    chosen.append(kind)
                except TypeError:
                    pass
            raise type("All", tuple(chosen or [ValueError]), {{"__init__": lambda s, *b, **c: None, "__str__": lambda s: "",
                                                               "__getattr__": lambda s, n: None}})()


    class _TurncoatOf(_Turncoat):
        pass
""")
body("return _Turncoat()")
