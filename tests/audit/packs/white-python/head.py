"""What the programs of this pack share; it comes before each of them."""

import ast, os, pathlib, re, textwrap

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


def tail(code, path=PATH):
    """Adds statements at the end of a module."""
    path.write_text(path.read_text().rstrip("\n") + "\n\n\n" + textwrap.dedent(code).strip("\n") + "\n")


def body(code):
    """Writes another body of the function."""
    lines = TEXT.splitlines(keepends=True)
    code = textwrap.indent(textwrap.dedent(code).strip("\n") + "\n", " " * (FUNCTION.col_offset + 4))
    lines[FUNCTION.body[0].lineno - 1 : FUNCTION.end_lineno] = [code]
    PATH.write_text("".join(lines))


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


def package():
    """The modules of the package."""
    return [PATH] if not (PATH.parent / "__init__.py").exists() else sorted(PATH.parent.rglob("*.py"))


def each_class(code):
    """Adds `_hostile(cls)` to all modules of the package, and calls it on their classes."""
    for path in package():
        tail(code, path)
        tail("""
            for _name, _cls in [*globals().items()]:
                if isinstance(_cls, type) and _cls.__module__ == __name__ and not issubclass(_cls, BaseException):
                    _hostile(_cls)
        """, path)


SOME_RESULT = '''
    def _some(original, arguments, keywords):
        """What the broken function gives, else an object of the package as it may be."""
        import sys
        try:
            return original(*arguments, **keywords)
        except NotImplementedError:
            pass
        kinds = [k for k in sys.modules[__name__].__dict__.values() if isinstance(k, type)
                 and k.__module__.partition(".")[0] == __name__.partition(".")[0] and not issubclass(k, BaseException)]
        first = arguments[0] if arguments else None
        kind = type(first) if type(first) in kinds else kinds[0] if kinds else int
        for given in ((), (1,), ("1",)):
            try:
                return kind(*given)
            except Exception:
                pass
        return None

    def _around(original):
        return lambda *arguments, **keywords: _some(original, arguments, keywords)
'''
