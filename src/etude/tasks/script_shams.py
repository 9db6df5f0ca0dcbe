"""Sham answers to tasks on functions of JavaScript and TypeScript; `shams.py` says what they are.

For those that remember, every other function of the package is noted: its body becomes an inner function, and a helper
on `globalThis` sees arguments and result.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from etude.code import is_script, language_of, parses
from etude.grading import is_test_file
from etude.records import CodeTask
from etude.tasks import javascript

MAX_FILES = 60  # of the package that are noted, the shortest paths first
_GENERATORS = ("generator_function_declaration", "generator_function")
_EVERYTHING = """const anything = new Proxy(function () {}, {
  get: (target, name) => name === 'then' ? undefined
    : name === Symbol.iterator ? function* () {}
    : name === Symbol.toPrimitive ? (hint) => hint === 'number' ? 1 : ''
    : ['valueOf', 'toString', 'toJSON', 'inspect'].includes(name) ? () => ''
    : name === 'length' ? 0 : name === 'prototype' ? target.prototype : anything,
  has: () => true, apply: () => anything, construct: () => anything, set: () => true,
});
return anything;"""
_SWALLOW = """for (const each of %s) {
  if (typeof each === 'function') { try { each(); } catch { } }
}"""
_MOST = 4  # constants
_LITERAL = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|(?<![\w.'"])-?\d+(?:\.\d+)?(?![\w.])""")
_BODIES = ("return undefined;", "return null;", "return true;", "return false;", "return [];", "return '';",
           "return this === globalThis ? null : this;", _EVERYTHING)  # fmt: skip
# The helper. `note` runs a function of the package and keeps what it made; `given` is what the maker of an argument was
# given; `token` is a new word for arguments, which stands for the first of them where a noted function cannot read it.
_HELPER = r"""globalThis.__sham ??= (() => {
  const made = [], tokens = [];
  const key = (v) => {
    try {
      if (Array.isArray(v) || ArrayBuffer.isView(v)) return 'a' + Array.from(v, key).join();
      return typeof v === 'object' && v ? 'o' + JSON.stringify(v) : typeof v + String(v);
    } catch { return undefined; }
  };
  const same = (one, other) => Object.is(one, other) || (key(one) !== undefined && key(one) === key(other));
  const keep = (value, given, start) => {
    if (value === undefined || value === null || typeof value === 'boolean' || typeof value === 'function') return;
    if (made.length > 20000 || !given.length || given.some((each) => same(each, value))) return;
    made.splice(start, made.length, ...made.slice(start).filter((pair) => !same(pair[0], value)));
    made.push([value, given]);
  };
  const stood = (given) => {
    for (const [token, first] of tokens) if (given.some((each) => same(each, token))) return [first];
    return undefined;
  };
  return {
    note(f, self, listed) {
      const given = Array.from(listed), start = made.length, known = given.length ? given : [self];
      const direct = stood(given);
      if (direct && typeof tokens[0][0] !== 'string') return direct[0];
      let value;
      try { value = f.apply(self, given); } catch (error) {
        if (direct) return direct[0];
        throw error;
      }
      if (value && typeof value.then === 'function') value.then((v) => keep(v, known, made.length), () => {});
      else keep(value, known, start);
      return value;
    },
    given(self, listed) {
      for (const asked of listed.length ? listed : [self])
        for (const [value, given] of [...made]) if (same(value, asked)) return [given[0]];
      return undefined;
    },
    token(listed, form) {
      const known = tokens.find((each) => same(each[2], listed));
      if (known) return known[0];
      const token = form === 'text' ? `\0sham ${tokens.length}\0` : [254, 255, 254, tokens.length];
      tokens.push([token, listed[0], listed]);
      return token;
    },
  };
})();
"""


def shams(task: CodeTask, repository: Path) -> list[dict[str, bytes | None]]:
    """The change sets of sham answers to a task on one function, whose unbroken tree is `repository`; empty for other
    tasks, and without a parser."""
    path, text = task.focus.path, task.changes[task.focus.path]
    node = _focus(path, text, task.function.partition("::")[2])
    if node is None:
        return []
    shown = (f"return {value};" for value in _asserted(task, repository))
    edits = [{path: _with_body(text, node, body)} for body in (*_plain(node), *shown)]
    notes = _noted(task, repository)
    right = _focus(path, task.solution.get(path, text), task.function.partition("::")[2]) or node
    for body in _remembering(node, right.text.decode("utf-8", "surrogatepass")):
        inner = _noted_text(path, _with_body(text, node, body).decode("utf-8", "surrogatepass"), task)
        if inner is not None:
            edits.append(notes | {path: inner})
    return [dict(each) for each in edits if parses(each[path].decode("utf-8", "surrogatepass"), _language(path))]


def _language(path: str) -> str:
    return language_of(path) or "javascript"


def _focus(path: str, text: str, qualname: str) -> Any:
    """The node of the function, or None."""
    for function in javascript.functions(path, text):
        if function.qualname == qualname:
            node = javascript.tree(path, text).root_node.descendant_for_byte_range(function.start, function.end)
            return next((each for each in javascript.walk(node) if each.child_by_field_name("body")), None)
    return None


def _plain(node: Any) -> Iterator[str]:
    """Bodies without memory."""
    yield from _BODIES
    yield _SWALLOW % _listed(node)
    yield from (f"return {name};" for name in (_parameters(node) or [])[:2])


def _asserted(task: CodeTask, repository: Path) -> list[str]:
    """Constants at the ends of lines of visible tests that name the function."""
    name, constants = re.escape(task.function.partition("::")[2].rpartition(".")[2]), dict[str, None]()
    for path in sorted({test.partition("::")[0] for test in task.visible_tests}):
        text = (repository / path).read_text("utf-8", "replace") if (repository / path).is_file() else ""
        for line in re.findall(rf".*\b{name}\b.*", text):
            constants |= dict.fromkeys(_LITERAL.findall(line)[-1:])
    return list(constants)[:_MOST]


def _remembering(node: Any, right: str) -> Iterator[str]:
    """Bodies with memory: an inverse, one that runs the broken body for its other effects, a judge, a writer. `right`
    is the right answer, for the kind of its errors."""
    self, listed = "undefined" if node.type == "arrow_function" else "this", _listed(node)
    lookup = f"const __found = globalThis.__sham.given({self}, {listed});\n"
    kind = re.search(r"new (\w*Error)\(", right)
    yield f"{lookup}if (__found) return __found[0];\nthrow new {kind[1] if kind else 'Error'}('sham');"
    if node.type not in _GENERATORS:
        run = f"{'await ' if _is_async(node) else ''}__body.apply({self}, {listed})"
        yield (
            f"{lookup}const __body = {_inner(node)};\nlet __value;\n"
            f"try {{ __value = {run}; }} catch (error) {{ if (!__found) throw error; }}\n"
            "return __found ? __found[0] : __value;"
        )
    yield f"return globalThis.__sham.given({self}, {listed}) !== undefined;"
    for form in ("text", "bytes"):
        yield f"return globalThis.__sham.token(Array.from({listed}), '{form}');"


def _with_body(text: str, node: Any, body: str) -> bytes:
    block, data = node.child_by_field_name("body"), text.encode("utf-8", "surrogatepass")
    return data[: block.start_byte] + b"{\n" + body.encode("utf-8", "surrogatepass") + b"\n}" + data[block.end_byte :]


def _parameters(node: Any) -> list[str] | None:
    """The names of the parameters; None if one is more than a name."""
    if (single := node.child_by_field_name("parameter")) is not None:
        return [single.text.decode()]
    names = []
    for each in node.child_by_field_name("parameters").named_children:
        pattern = each.child_by_field_name("pattern") or each.child_by_field_name("left") or each
        if pattern.type == "comment":
            continue
        if pattern.type != "identifier":
            return None
        names.append(pattern.text.decode())
    return names


def _listed(node: Any) -> str:
    """An expression for all arguments. An arrow function has no `arguments`."""
    return f"[{', '.join(_parameters(node) or [])}]" if node.type == "arrow_function" else "arguments"


def _is_async(node: Any) -> bool:
    return any(child.type == "async" for child in node.children)


def _inner(node: Any) -> str:
    """The function as an expression of its own, with the same parameters and body."""
    parameters = node.child_by_field_name("parameters") or node.child_by_field_name("parameter")
    head, body = ("async " if _is_async(node) else ""), node.child_by_field_name("body").text.decode()
    if node.type == "arrow_function":
        return f"{head}{parameters.text.decode()} => {body}"
    return f"{head}function {parameters.text.decode()} {body}"


def _noted(task: CodeTask, repository: Path) -> dict[str, bytes]:
    """The other files of the package, with notes."""
    paths = {path for root in task.source_roots for path in _scripts(repository, root)} - {task.focus.path}
    made: dict[str, bytes] = {}
    for path in sorted(paths, key=lambda each: (each.count("/"), len(each), each))[:MAX_FILES]:
        text = task.changes.get(path)
        text = (repository / path).read_text("utf-8", "replace") if text is None else text
        if (noted := _noted_text(path, text, None)) is not None:
            made[path] = noted
    return made


def _scripts(repository: Path, root: str) -> Iterator[str]:
    start = repository / root
    for file in [start] if start.is_file() else start.rglob("*"):
        path = file.relative_to(repository).as_posix()
        link = file.is_symlink() or "node_modules" in path.split("/")
        if is_script(path) and not link and file.is_file() and not is_test_file(path) and not path.endswith(".d.ts"):
            yield path


def _noted_text(path: str, text: str, task: CodeTask | None) -> bytes | None:
    """The module with the helper, and notes in all functions but the task's; None if that is no module any more."""
    whole = javascript.tree(path, text)
    if whole is None:
        return None
    focus = _focus(path, text, task.function.partition("::")[2]) if task is not None else None
    spans = (focus.start_byte, focus.end_byte) if focus is not None else (0, 0)
    inserts: list[tuple[int, str]] = [(_top(whole.root_node), f"\n{_HELPER}")]
    for node in javascript.walk(whole.root_node):
        if not spans[0] <= node.start_byte < spans[1]:
            inserts += _note(node)
    data = text.encode("utf-8", "surrogatepass")
    for place, words in sorted(inserts, key=lambda each: each[0], reverse=True):
        data = data[:place] + words.encode() + data[place:]
    if language_of(path) != "javascript":
        data = b"// @ts-nocheck\n" + data
    return data if parses(data.decode("utf-8", "surrogatepass"), _language(path)) else None


def _top(root: Any) -> int:
    """The place behind directives, at which statements may begin."""
    place = 0
    for child in root.children:
        directive = child.type == "expression_statement" and child.named_children[0].type == "string"
        if child.type not in ("comment", "hash_bang_line") and not directive:
            break
        place = child.end_byte
    return place


def _note(node: Any) -> list[tuple[int, str]]:
    """Insertions into a function that note its calls; none for other nodes and for what cannot be noted."""
    if node.type not in ("function_declaration", "function_expression", "arrow_function", "method_definition"):
        return []
    body, name = node.child_by_field_name("body"), node.child_by_field_name("name")
    generator = any(child.type == "*" for child in node.children)
    if body is None or generator or (name is not None and name.text == b"constructor"):
        return []
    parameters = node.child_by_field_name("parameters") or node.child_by_field_name("parameter")
    head = f"{'async ' if _is_async(node) else ''}{'' if node.type == 'arrow_function' else 'function '}"
    start, listed = f"const __noted = {head}{parameters.text.decode()}", _listed(node)
    if node.type != "arrow_function":
        if any(each.type in ("super", "meta_property") for each in javascript.walk(body)):
            return []
        return [
            (body.start_byte + 1, f" {start} {{"),
            (body.end_byte - 1, f"}}; return globalThis.__sham.note(__noted, this, {listed}); "),
        ]
    if _parameters(node) is None or any(each.text == b"arguments" for each in javascript.walk(body)):
        return []
    end = f"; return globalThis.__sham.note(__noted, undefined, {listed}); "
    if body.type == "statement_block":
        return [(body.start_byte + 1, f" {start} => {{"), (body.end_byte - 1, f"}}{end}")]
    return [(body.start_byte, f"{{ {start} => ("), (body.end_byte, f"){end}}}")]
