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
import re
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
# An error of as many classes as go together, with every text and name of the module in its message.
_RAISE = """texts, bases = [*map(str, locals().values())], ()
own = [v for v in globals().values() if isinstance(v, type) and issubclass(v, Exception)]
for kind in (*own, ValueError, TypeError, LookupError, AttributeError, RuntimeError, ArithmeticError):
    try:
        bases = type("Error", (*bases, kind), {}).__bases__
    except TypeError:
        pass
code = [v.__code__ for v in globals().values() if hasattr(v, "__code__")]
texts += [text for each in code for text in (*each.co_consts, *each.co_names) if isinstance(text, str)]
texts += globals()
raise type("Error", bases, {"__str__": lambda self: " ".join(texts)[:4000]})()"""
_MOST = 4  # constants, and fields
_FURTHER = (
    *(f"return {each}" for each in ("0", "1", "-1", "1.0", "''", "'x'", "b''", "[]", "[None]", "[0]", "()", "(None,)")),
    *(f"return {each}" for each in ("{}", "{'x': None}", "set()", "object()", "lambda *a, **k: None")),
    *(f"return [*range({n})]" for n in (2, 3, 4, 5)),
    *(f"raise {kind}('sham')" for kind in ("ValueError", "TypeError", "KeyError", "AssertionError")),
    "yield from ()",
)
_BODIES = ("return None", "return True", "return False", "return iter(())", _EVERYTHING, _SWALLOW, _RAISE)

# Behind the module: what is common to the shams that remember. `_sham_root` is the name of the package.
_COMMON = '''
import sys as _sham_sys, types as _sham_types

_sham_root = __name__.partition(".")[0]


def _sham_ours(space):
    return str(space.get("__name__")).partition(".")[0] == _sham_root


def _sham_bytes(value):
    """Texts as bytes, other values as they are."""
    if type(value) is str:
        return value.encode("utf-8", "replace")
    return bytes(value) if type(value) is bytearray else value


def _sham_known(value, depth=0):
    """Whether a value is of the standard library or the package, and holds no other ones, which may not be asked."""
    kind = type(value)
    if kind in (list, tuple, set, frozenset, dict):
        parts = [*value, *value.values()] if kind is dict else value
        return depth < 6 and len(parts) < 2000 and all(_sham_known(part, depth + 1) for part in parts)
    home = str(getattr(kind, "__module__", "")).partition(".")[0]
    return home == _sham_root or home in _sham_sys.stdlib_module_names


def _sham_same(one, other):
    """Whether two values are equal; texts and bytes are one."""
    one, other = _sham_bytes(one), _sham_bytes(other)
    if one is other or type(one) is not type(other):
        return one is other
    try:
        return _sham_known(one) and _sham_known(other) and bool(one == other)
    except Exception:
        return False


def _sham_plain(arguments):
    """The arguments without the object itself, unless it is the only one."""
    return {n: v for n, v in arguments.items() if n not in ("self", "cls")} or dict(arguments)


def _sham_functions():
    """The functions of the package, those in classes, descriptors and closures too."""
    seen = {}
    pending = [m for n, m in list(_sham_sys.modules.items()) if n.partition(".")[0] == _sham_root]
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        kind = type(value)
        if kind is _sham_types.ModuleType:
            pending += vars(value).values() if _sham_ours(vars(value)) else ()
        elif issubclass(kind, type) and _sham_ours({"__name__": value.__module__}):
            pending += vars(value).values()
        elif kind in (staticmethod, classmethod):
            pending.append(value.__func__)
        elif kind is property:
            pending += [value.fget, value.fset]
        elif kind.__name__ == "cached_property":
            pending.append(value.func)
        elif kind is _sham_types.FunctionType:
            pending += [cell.cell_contents for cell in value.__closure__ or () if cell != _sham_types.CellType()]
            if _sham_ours(value.__globals__):
                yield value


def _sham_wrap(around):
    """Every function of the package runs inside `around(old, code)`. The functions stay the same objects, so that those
    who hold them call the new code."""
    builtins = _sham_sys.modules["builtins"]
    kept = builtins.__dict__.setdefault("_sham_kept", [])
    for function in _sham_functions():
        code = function.__code__
        if code.co_name[:6] in ("_sham_", "<lambd") or function.__name__ == _sham_focus:
            continue
        old = _sham_types.FunctionType(
            code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
        old.__kwdefaults__ = function.__kwdefaults__
        cells = "".join(f"  {name}\\n" for name in code.co_freevars)
        given = "".join(f" {name} = None\\n" for name in code.co_freevars)
        space = {}
        exec(f"def outer():\\n{given} def _sham_new(*_a, **_k):\\n"
             f"  return _sham_kept[{len(kept)}](_a, _k)\\n{cells} return _sham_new", space)
        kept.append(around(old, code))
        function.__code__ = space["outer"]().__code__
'''
_MADE = '''
_sham_made = {}  # key -> (number, value, arguments) of the calls of the package, the outermost ones that gave a value
_sham_count = [0]
_sham_asked = []


def _sham_key(value):
    value = _sham_bytes(value)
    return (value,) if type(value) in (bytes, int, float) else id(type(value))


def _sham_noted(old, code):
    positional = code.co_varnames[: code.co_argcount]

    def _sham_call(arguments, named):
        start, value = _sham_count[0], old(*arguments, **named)
        if value is not None and type(value) is not bool:
            given = dict(zip(positional, arguments)) | named
            given.update({f"*{i}": v for i, v in enumerate(arguments[code.co_argcount :])})
            _sham_note(value, given, start)
        return value

    return _sham_call


def _sham_note(value, given, start):
    if not given or _sham_count[0] > 20000 or any(_sham_same(value, v) for v in given.values()):
        return
    kept = _sham_made.setdefault(_sham_key(value), [])
    kept[:] = [each for each in kept if each[0] < start or not _sham_same(each[1], value)]
    kept.append((_sham_count[0], value, given))
    _sham_count[0] += 1


def _sham_watch():
    """The functions of the package are noted, those of modules that are imported later as well."""
    builtins = _sham_sys.modules["builtins"]
    imports, seen, size = builtins.__import__, set(), [0]

    def _sham_load(*arguments, **named):
        module = imports(*arguments, **named)
        if len(_sham_sys.modules) == size[0]:
            return module
        size[0] = len(_sham_sys.modules)
        known = {n: m for n, m in list(_sham_sys.modules.items()) if n.partition(".")[0] == _sham_root}
        ready = {n for n, m in known.items() if not getattr(getattr(m, "__spec__", None), "_initializing", False)}
        if ready - seen:
            seen.update(ready)
            _sham_wrap(_sham_noted)
        return module

    builtins.__import__ = _sham_load
    _sham_wrap(_sham_noted)


def _sham_given(mine):
    """[what the maker of an argument was given], or []. Other arguments of one name must be equal."""
    if not _sham_asked:
        _sham_asked.append(True)
        _sham_wrap(_sham_noted)
    for name, asked in _sham_plain(mine).items():
        for _, value, given in list(_sham_made.get(_sham_key(asked), ())):
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


_sham_watch()
'''
_TOKENS = """
_sham_tokens = []  # (token, arguments)


def _sham_token(mine, kind):
    mine = _sham_plain(mine)
    for token, given in _sham_tokens:
        if given.keys() == mine.keys() and all(_sham_same(given[n], mine[n]) for n in mine):
            return token
    if not _sham_tokens:
        _sham_wrap(_sham_reader)
    token = kind(f"\\0sham {len(_sham_tokens)}\\0".encode()) if kind is not str else f"\\0sham {len(_sham_tokens)}\\0"
    _sham_tokens.append((token, mine))
    return token


def _sham_reader(old, code):
    def _sham_read(arguments, named):
        try:
            return old(*arguments, **named)
        except Exception:
            for token, given in _sham_tokens:
                if any(_sham_same(v, token) for v in (*arguments, *named.values())):
                    return next(iter(given.values()))
            raise
    return _sham_read
"""
_INVERSE = """_sham_found = _sham_given(locals())
if _sham_found:
    return _sham_found[0]"""


def sham_answers(task: CodeTask, repository: Path) -> list[dict[str, bytes | None]]:
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
    known = [f"return {value}" for value in (*_asserted(task, repository, definition.name), *_fields(text, qualname))]
    shown = [_with_body(text, definition, body) for body in known]
    return [
        {path: sham.encode("utf-8", "surrogateescape")} for sham in (*_texts(text, definition, sorted(raised)), *shown)
    ]


def further_shams(task: CodeTask) -> list[dict[str, bytes | None]]:
    """More constants and shapes, which are too many for the gates of a build: `etude tasks harden` plays them."""
    path = task.focus.path
    definition = None
    if path in task.changes and not is_script(path):
        definition = _definition(task.changes[path], task.function.partition("::")[2].split("."))
    if definition is None:
        return []
    text = task.changes[path]
    return [{path: _with_body(text, definition, body).encode("utf-8", "surrogateescape")} for body in _FURTHER]


def _asserted(task: CodeTask, repository: Path, name: str) -> list[str]:
    """Constants that visible tests compare with a call of the function."""
    constants: dict[str, None] = {}
    for path in sorted({test.partition("::")[0] for test in task.visible_tests}):
        tree = parse((repository / path).read_text("utf-8", "replace")) if (repository / path).is_file() else None
        for node in ast.walk(tree) if tree is not None else ():
            if isinstance(node, ast.Compare) and len(node.comparators) == 1:
                sides = node.left, node.comparators[0]
                for one, other in (sides, sides[::-1]):
                    if re.search(rf"\b{name}\b", ast.unparse(one)) and _is_literal(other):
                        constants[ast.unparse(other)] = None
    return list(constants)[:_MOST]


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, MemoryError, RecursionError):
        return False
    return True


def _fields(text: str, qualname: str) -> list[str]:
    """Fields that the methods of the function's class set, as "self.name"."""
    names = qualname.split(".")[:-1]
    node: ast.AST | None = parse(text) if names else None
    for name in names:
        children = ast.iter_child_nodes(node) if node is not None else iter(())
        node = next((each for each in children if isinstance(each, ast.ClassDef) and each.name == name), None)
    fields = {
        f"self.{each.attr}": None
        for each in (ast.walk(node) if node is not None else ())
        if isinstance(each, ast.Attribute)
        and isinstance(each.ctx, ast.Store)
        and isinstance(each.value, ast.Name)
        and each.value.id == "self"
    }
    return list(fields)[:_MOST]


def _texts(text: str, definition: _Definition, raised: Sequence[str]) -> Iterator[str]:
    """The module with each sham body. `raised` are names of errors that the right answer raises."""
    parameters = [argument.arg for argument in (*definition.args.posonlyargs, *definition.args.args)]
    for body in (*_BODIES, *(f"return {name}" for name in parameters[:2])):
        yield _with_body(text, definition, body)
    names = f"\n_sham_focus, _sham_raised = {definition.name!r}, {list(raised)!r}\n"
    made, tokens = f"{names}{_COMMON}{_MADE}", f"{names}{_COMMON}{_TOKENS}"
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
