"""Files of sessions, the format of each, and the rows of all of them.

A file's format is that of its first lines. Session files are read whole, logs of requests line by line.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import chain, islice
from pathlib import Path
from typing import Any

import blake3

from etude.code import redacted_json, secret_in_json
from etude.corpus.sessions import claude_code, codex, pi
from etude.corpus.sessions.request_logs import RequestLog
from etude.corpus.sessions.thread import AgentThread, Row, learned, readable, thread_rows
from etude.errors import UserError
from etude.protocol.apis import RequestRefused, as_refusal, read, tools_of
from etude.renderers import printable_json

_AGENTS = {"claude-code": claude_code, "codex": codex, "pi": pi}
_HEAD = 20  # lines in which the format of a file shows
_MAX_DEPTH = 100
_MAX_SECRETS = 5  # in a row; a row with more is refused


@dataclass
class SessionReport:
    """The report of a reading: files by format, rows, messages by model, secrets by rule, refusals by reason."""

    files: Counter[str] = field(default_factory=Counter[str])
    rows: int = 0
    learned: int = 0
    models: Counter[str] = field(default_factory=Counter[str])
    secrets: Counter[str] = field(default_factory=Counter[str])
    refused: Counter[str] = field(default_factory=Counter[str])
    first: dict[str, str] = field(default_factory=dict[str, str])
    """The first file and line for each reason of a refusal."""

    def refuse(self, place: str, why: str) -> None:
        """Counts a refusal."""
        self.refused[why] += 1
        self.first.setdefault(why, place)


def session_rows(
    paths: Sequence[Path], report: SessionReport, models: Sequence[str] = (), threads: Sequence[AgentThread] = ()
) -> Iterator[Row]:
    """The rows of files and folders (.json and .jsonl below them), and of `threads` from elsewhere. `models` are
    patterns, as of file names; a thread of other models is refused. Secrets are replaced by the name of their rule, and
    a message in which one was replaced is not learned from. Raises UserError for a path without files."""
    whole: list[Row] = []

    def every() -> Iterator[AgentThread]:
        for thread in (*threads, *_threads(paths, report, models, whole.append)):
            if models and not _wanted(str(thread.origin.get("model", "")), models):
                report.refuse(str(thread.origin.get("path", "")), "it is of a model that --model leaves out")
            elif not any(map(learned, thread.messages)):
                report.refuse(str(thread.origin.get("path", "")), "its answer was cut, or is not known to be a model's")
            else:
                report.models[str(thread.origin.get("model") or "unknown")] += 1
                yield thread

    for row in thread_rows(every()):
        yield from _without_secrets(row, report)
    for row in whole:
        if secret_in_json(row) is not None:
            report.refuse(row["origin"]["path"], "a trajectory with tokens holds a likely secret")
            continue
        report.rows += 1
        yield row


def _wanted(models: str, patterns: Sequence[str]) -> bool:
    names = models.split(", ")
    return all(any(fnmatchcase(name, pattern) for pattern in patterns) for name in names)


def _threads(
    paths: Sequence[Path], report: SessionReport, models: Sequence[str], keep: Callable[[Row], None]
) -> Iterator[AgentThread]:
    for path in dict.fromkeys(chain.from_iterable(map(_files, paths))):
        lines = _lines(path, report)
        head = list(islice(lines, _HEAD))
        agent = next((name for name in _AGENTS if any(_AGENTS[name].is_session(line) for _, line in head)), None)
        if agent is not None:
            report.files[agent] += 1
            yield from _of_agent(agent, path.name, [line for _, line in chain(head, lines)], report)
            continue
        log, formats = RequestLog(), set[str]()
        for place, line in chain(head, lines):
            try:
                with as_refusal():
                    kind, threads = _of_line(line, place, log, models, keep)
            except RequestRefused as e:
                report.refuse(place, str(e))
                continue
            formats.add(kind)
            yield from (_placed(thread, place) for thread in threads)
        report.files.update(formats)


def _files(path: Path) -> list[Path]:
    """The file, or the .json and .jsonl files below a folder, sorted. Raises UserError if there is none."""
    if path.is_dir():
        files = sorted(file for kind in ("*.json", "*.jsonl") for file in path.rglob(kind) if file.is_file())
    else:
        files = [path] if path.is_file() else []
    if not files:
        raise UserError(f"{path} is neither a file nor a folder with .json or .jsonl files: name the agent's logs")
    return files


def _lines(path: Path, report: SessionReport) -> Iterator[tuple[str, dict[str, Any]]]:
    """The JSON objects of a file, each with its place: lines of a .jsonl, otherwise all of it, or each of a list."""
    try:
        opened = path.open("rb")
    except OSError as e:
        raise UserError(f"{path} cannot be read: {e.strerror}") from None
    with opened as file:
        sources = enumerate(file, 1) if path.suffix == ".jsonl" else [(0, file.read())]
        for number, source in sources:
            place = f"{path.name}:{number}" if number else path.name
            if not source.strip():
                continue
            try:
                value = json.loads(source)
            except (ValueError, RecursionError):
                report.refuse(place, "it is not JSON")
                continue
            for entry in value if isinstance(value, list) and not number else [value]:
                if not isinstance(entry, dict):
                    report.refuse(place, "it is not a JSON object")
                elif not _flat(entry):
                    report.refuse(place, f"it is nested more than {_MAX_DEPTH} deep")
                else:
                    shown: Any = printable_json(entry)  # no file may hold half of a surrogate pair
                    yield place, shown


def _flat(value: Any) -> bool:
    """Whether a JSON value is nested no deeper than what follows can read."""
    depth, level = 0, [value]
    while level and depth <= _MAX_DEPTH:
        level = [
            inner
            for each in level
            for inner in (each.values() if isinstance(each, dict) else each)
            if isinstance(inner, dict | list)
        ]
        depth += 1
    return not level


def _of_agent(
    agent: str, place: str, lines: Sequence[Mapping[str, Any]], report: SessionReport
) -> Iterator[AgentThread]:
    try:
        with as_refusal():
            threads = list(_AGENTS[agent].threads(lines))
    except RequestRefused as e:
        report.refuse(place, str(e))
        return
    if not threads:
        report.refuse(place, "it holds no answer of a model")
    yield from (_placed(thread, place) for thread in threads)


def _placed(thread: AgentThread, place: str) -> AgentThread:
    origin: Any = printable_json({"path": place, **thread.origin})
    return replace(thread, origin=origin)


def _of_line(
    line: Mapping[str, Any], place: str, log: RequestLog, models: Sequence[str], keep: Callable[[Row], None]
) -> tuple[str, list[AgentThread]]:
    """The format of a line of a file that is no agent's session, and its threads. A trajectory is kept whole: its
    tokens, if it has them, are those that the model sampled."""
    if "steps" in line:
        model = str((line.get("agent") or {}).get("model_name") or "")
        if models and not _wanted(model, models):
            raise ValueError("it is of a model that --model leaves out")
        digest = blake3.blake3(json.dumps(line, sort_keys=True).encode()).hexdigest()[:32]
        keep({**line, "id": digest, "origin": printable_json({"path": place, "harness": "atif", "model": model})})
        return "atif", []
    if "messages" in line and "request" not in line:
        messages = read("chat", line)
        weighed = [m | {"weight": m.get("weight", 1)} if m["role"] == "assistant" else m for m in map(dict, messages)]
        shown = readable(weighed)
        if not shown:
            raise ValueError("its calls and results are no pairs, or it has no answer")
        return "messages", [AgentThread(shown, tools_of(line), {"model": str(line.get("model") or "")})]
    return "requests", list(log.threads(line))


def _without_secrets(row: Row, report: SessionReport) -> Iterator[Row]:
    """The row with secrets replaced, or nothing: for a row of many secrets, or one without a message to learn."""
    try:
        (messages, tools), counts = _replaced(row["messages"], row.get("tools", []))
    except RecursionError:
        report.refuse(row["origin"]["path"], "it is nested too deeply")
        return
    report.secrets += counts
    count = sum(map(learned, messages))
    if counts.total() > _MAX_SECRETS:
        report.refuse(row["origin"]["path"], f"it holds more than {_MAX_SECRETS} likely secrets")
    elif not count:
        report.refuse(row["origin"]["path"], "no message in it is known to be the model's, whole and without secrets")
    elif (rule := secret_in_json([messages, tools, row["origin"]])) is not None:
        report.refuse(row["origin"]["path"], f"it holds a likely secret that cannot be cut out ({rule})")
    else:
        report.rows += 1
        report.learned += count
        yield row | {"messages": messages} | ({"tools": tools} if tools else {})


def _replaced(messages: list[Any], tools: list[Any]) -> tuple[tuple[list[Any], list[Any]], Counter[str]]:
    """Messages and tools without secrets, and the count by rule. What the model said with one has the weight 0."""
    counts: Counter[str] = Counter()
    if secret_in_json([messages, tools]) is None:
        return (messages, tools), counts
    clean: list[Any] = []
    for message in messages:
        shown, replaced = redacted_json(message)
        counts += replaced
        clean.append(shown | {"weight": 0} if replaced and "weight" in shown else shown)
    tools, replaced = redacted_json(tools)
    return (clean, tools), counts + replaced
