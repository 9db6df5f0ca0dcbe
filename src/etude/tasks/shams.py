"""Sham answers: bodies that need no understanding of a function, such as `return None`. A task whose hidden tests one
of them passes would reward shams, and is none.

Besides constants there are sham answers that remember, for tests that only read back what the library itself wrote:

given     an inverse: what another function of the package was given when it made the argument; for other arguments
          the broken body or an error of the package
written   an agreeing judge: whether another function of the package made an argument
token     a writer of its own format: a new word for each argument; a function of the package that cannot read a word
          answers what the word stands for
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from etude.code import is_script, parse
from etude.records import CodeTask
from etude.tasks import script_shams

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_Definition = ast.FunctionDef | ast.AsyncFunctionDef

# Equal to everything, callable, iterable, and a context that no exception leaves.
_EVERYTHING = """class Anything:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __bool__(self): return True
    def __call__(self, *arguments, **named): return self
    def __getattr__(self, name): return self
    def __iter__(self): return iter(())
    def __enter__(self): return self
    def __exit__(self, *error): return True
return Anything()"""
# Of a context manager: what happens in its block is swallowed.
_SWALLOW = """try:
    yield None
except BaseException:
    pass"""
_BODIES = ("return None", "return True", "return False", "return iter(())", _EVERYTHING, _SWALLOW)

# Behind the module: what is common to the shams that remember. `_sham_root` is the name of the package.
_COMMON = '''
import gc as _sham_gc, sys as _sham_sys, types as _sham_types

_sham_root = __name__.partition(".")[0]


def _sham_ours(space):
    return str(space.get("__name__")).partition(".")[0] == _sham_root


def _sham_same(one, other):
    """Whether two values are equal; texts and bytes are one."""
    try:
        one, other = (v.encode() if isinstance(v, str) else bytes(v) if isinstance(v, bytearray) else v
                      for v in (one, other))
        return one is other or (type(one) is type(other) and bool(one == other))
    except Exception:
        return False


def _sham_plain(arguments):
    """The arguments without the object itself, unless it is the only one."""
    return {n: v for n, v in arguments.items() if n not in ("self", "cls")} or dict(arguments)
'''
_MADE = '''
_sham_made = []  # (value, arguments) of each call of the package: the outermost ones that gave the value
_sham_running = []


def _sham_hook(frame, event, value):
    if event not in ("call", "return") or frame.f_code.co_name[:1] == "<" or not _sham_ours(frame.f_globals):
        return
    code = frame.f_code
    if event == "call":
        count = code.co_argcount + code.co_kwonlyargcount
        given = {n: frame.f_locals[n] for n in code.co_varnames[:count] if n in frame.f_locals}
        if code.co_flags & 4:
            given.update({f"*{i}": v for i, v in enumerate(frame.f_locals.get(code.co_varnames[count], ()))})
        _sham_running.append((frame, given, len(_sham_made)))
    elif _sham_running and _sham_running[-1][0] is frame:
        _, given, start = _sham_running.pop()
        if value is None or isinstance(value, bool) or code.co_name == _sham_focus or not given:
            return
        if len(_sham_made) > 20000 or any(_sham_same(value, v) for v in given.values()):
            return
        _sham_made[start:] = [pair for pair in _sham_made[start:] if not _sham_same(pair[0], value)]
        _sham_made.append((value, given))


def _sham_given(mine):
    """[what the maker of an argument was given], or []. Other arguments of one name must be equal."""
    for name, asked in _sham_plain(mine).items():
        for value, given in list(_sham_made):
            if _sham_same(value, asked):
                (first, argument), *others = _sham_plain(given).items()
                if all(_sham_same(v, mine[n]) for n, v in others if n in mine and n != name):
                    return [argument]
    return []


def _sham_error():
    """An error of the kinds that the function raises, or that the package has."""
    space = {**vars(__import__("builtins")), **globals()}
    kinds = [space[n] for n in _sham_raised if n in space] or [
        v for v in globals().values() if str(getattr(v, "__module__", "")).partition(".")[0] == _sham_root]
    kinds = [v for v in dict.fromkeys(kinds) if isinstance(v, type) and issubclass(v, Exception)] or [ValueError]
    kinds = [v for v in kinds if not any(o is not v and issubclass(o, v) for o in kinds)]
    try:
        kind = type(kinds[0].__name__, tuple(kinds), {})
    except TypeError:
        kind = kinds[0]
    try:
        return kind("sham")
    except Exception:
        return kind.__new__(kind)


_sham_sys.setprofile(_sham_hook)
'''
_TOKENS = '''
_sham_tokens = []  # (token, arguments)


def _sham_token(mine, kind):
    mine = _sham_plain(mine)
    for token, given in _sham_tokens:
        if given.keys() == mine.keys() and all(_sham_same(given[n], mine[n]) for n in mine):
            return token
    if not _sham_tokens:
        _sham_wrap()
    token = kind(f"\\0sham {len(_sham_tokens)}\\0".encode()) if kind is not str else f"\\0sham {len(_sham_tokens)}\\0"
    _sham_tokens.append((token, mine))
    return token


def _sham_wrap():
    """Every function of the package answers with what a token stands for, instead of an error. The functions stay the
    same objects, so that those who hold them call the new code."""
    import builtins
    kept = builtins._sham_kept = []
    for function in _sham_gc.get_objects():
        if type(function) is not _sham_types.FunctionType or not _sham_ours(function.__globals__):
            continue
        if function.__name__[:6] in ("_sham_", "<lambd") or function.__name__ == _sham_focus or function.__closure__:
            continue
        old = _sham_types.FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__)
        old.__kwdefaults__ = function.__kwdefaults__
        space = {}
        exec(f"def new(*a, **k):\\n import builtins\\n return builtins._sham_kept[{len(kept)}](a, k)", space)
        kept.append(_sham_reader(old))
        function.__code__ = space["new"].__code__


def _sham_reader(old):
    def read(arguments, named):
        try:
            return old(*arguments, **named)
        except Exception:
            for token, given in _sham_tokens:
                if any(_sham_same(v, token) for v in (*arguments, *named.values())):
                    return next(iter(given.values()))
            raise
    return read
'''
_INVERSE = """_sham_found = _sham_given(locals())
if _sham_found:
    return _sham_found[0]"""


def shams(task: CodeTask, repository: Path) -> list[dict[str, bytes | None]]:
    """The change sets of sham answers to a task on one function, whose unbroken tree is `repository`; empty for other
    tasks."""
    path, qualname = task.focus.path, task.function.partition("::")[2]
    if path not in task.changes:
        return []
    if is_script(path):
        return script_shams.shams(task, repository)
    text = task.changes[path]
    definition, right = (_definition(each, qualname.split(".")) for each in (text, task.solution.get(path, "")))
    if definition is None:
        return []
    errors = [node.exc for node in ast.walk(right or definition) if isinstance(node, ast.Raise)]
    raised = {ast.unparse(error).partition("(")[0] for error in errors if error is not None}
    return [{path: sham.encode("utf-8", "surrogateescape")} for sham in _texts(text, definition, sorted(raised))]


def _texts(text: str, definition: _Definition, raised: Sequence[str]) -> Iterator[str]:
    """The module with each sham body. `raised` are names of errors that the right answer raises."""
    parameters = [argument.arg for argument in (*definition.args.posonlyargs, *definition.args.args)]
    for body in (*_BODIES, *(f"return {name}" for name in parameters[:2])):
        yield _with_body(text, definition, body)
    names = f"\n_sham_focus, _sham_raised = {definition.name!r}, {list(raised)!r}\n"
    made, tokens = f"\n{_COMMON}{_MADE}{names}", f"\n{_COMMON}{_TOKENS}{names}"
    yield _with_body(text, definition, _overruled(definition)) + made
    yield _with_body(text, definition, _INVERSE + "\nraise _sham_error()") + made
    yield _with_body(text, definition, "return bool(_sham_given(locals()))") + made
    for kind in ("str", "bytes"):
        yield _with_body(text, definition, f"return _sham_token(locals(), {kind})") + tokens


def _overruled(definition: _Definition) -> str:
    """A body that runs the present one for its other effects, and answers what is remembered."""
    signature = definition.args
    plain = [argument.arg for argument in (*signature.posonlyargs, *signature.args)]
    rest = [f"*{signature.vararg.arg}"] if signature.vararg else ["*"] if signature.kwonlyargs else []
    named = [argument.arg for argument in signature.kwonlyargs]
    more = [f"**{signature.kwarg.arg}"] if signature.kwarg else []
    head = ", ".join([*plain, *rest, *named, *more])
    call = ", ".join([*plain, *(each for each in rest if each != "*"), *(f"{n}={n}" for n in named), *more])
    waits = isinstance(definition, ast.AsyncFunctionDef)
    body = textwrap.indent("\n".join(ast.unparse(statement) for statement in definition.body), "    ")
    return f"""_sham_found = _sham_given(locals())
{"async " if waits else ""}def _sham_body({head}):
{body}
try:
    _sham_value = {"await " if waits else ""}_sham_body({call})
except Exception:
    if not _sham_found:
        raise
return _sham_found[0] if _sham_found else _sham_value"""


def _definition(text: str, names: list[str]) -> _Definition | None:
    """The function of that qualified name."""
    node: ast.AST | None = parse(text)
    for name in names:
        children = ast.iter_child_nodes(node) if node is not None else iter(())
        node = next(
            (each for each in children if isinstance(each, (*_FUNCTIONS, ast.ClassDef)) and each.name == name), None
        )
    return node if isinstance(node, _FUNCTIONS) else None


def _with_body(text: str, definition: _Definition, body: str) -> str:
    """The text with another body of the function, on lines of its own below the signature."""
    lines = text.split("\n")
    first, last = definition.body[0], definition.end_lineno or definition.lineno
    margin = lines[definition.lineno - 1]
    indent = margin[: len(margin) - len(margin.lstrip())] + "    "
    begin = min([first.lineno, *(decorator.lineno for decorator in getattr(first, "decorator_list", ()))])
    # Of a body on the line of its signature, the part of the line before the body stays. Offsets count bytes.
    before = lines[begin - 1].encode("utf-8", "surrogateescape")[: first.col_offset].decode("utf-8", "surrogateescape")
    head = [before.rstrip()] if begin == first.lineno and before.strip() else []
    return "\n".join([*lines[: begin - 1], *head, *(indent + line for line in body.split("\n")), *lines[last:]])
