"""`etude corpus sessions | pull-requests`: conversations to learn from, as a file of rows."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from etude import runfolder
from etude.errors import UserError

if TYPE_CHECKING:
    from etude.corpus.sessions import AgentThread, SessionReport
    from etude.rollout import PullRequest

_NAMED = 8  # reasons that are printed


def add_sessions(actions: Any) -> None:
    """The arguments of `etude corpus sessions`."""
    parser = actions.add_parser("sessions", help="make rows of agents' sessions and request logs", allow_abbrev=False)
    logs = "files and folders: sessions of Claude Code, Codex or Pi, logs of requests, ATIF trajectories, conversations"
    parser.add_argument("logs", nargs="*", type=Path, metavar="LOG", help=logs)
    parser.add_argument("--live", type=Path, metavar="CONFIG", help="a live loop, for its turns with consent")
    which = "only sessions of these models (patterns, e.g. 'own-*'); default: all"
    parser.add_argument("--model", nargs="+", default=[], metavar="NAME", help=which)
    _add_output(parser, "sessions")


def add_pull_requests(actions: Any) -> None:
    """The arguments of `etude corpus pull-requests`."""
    parser = actions.add_parser("pull-requests", help="make rows of a clone's pull requests", allow_abbrev=False)
    parser.add_argument("repository", type=Path, metavar="CLONE", help="git clone of your own repository")
    parser.add_argument(
        "--archive", type=Path, metavar="DIR", help="the forge's REST answers: pulls, comments, reviews"
    )
    parser.add_argument("--no-commits", action="store_true", help="leave commits without a pull request out")
    parser.add_argument("--hold-out-after", metavar="DATE", help="later ones are held out, e.g. 2026-09-30")
    parser.add_argument("--seed", type=int, default=0, help="of the lines that are read (default: 0)")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help=".jsonl to write; must be new")


def _add_output(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help=".jsonl to write; must be new")
    share = f"share of the {what} for FILE.held_out.jsonl (default: 0)"
    parser.add_argument("--held-out", type=float, default=0.0, metavar="SHARE", help=share)


def run_sessions(arguments: argparse.Namespace) -> None:
    """Writes the rows, and prints a report. Raises UserError."""
    from etude.corpus.sessions import SessionReport, session_rows

    output = new_rows_file(arguments.output)
    if not arguments.logs and arguments.live is None:
        raise UserError("there is nothing to read: name logs, or a live loop by --live")
    if not 0 <= arguments.held_out < 1:
        raise UserError(f"--held-out {arguments.held_out} is a share from 0 to below 1")
    report = SessionReport()
    threads = [] if arguments.live is None else _of_live_loop(arguments.live, report)
    parts: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    for row in session_rows(arguments.logs, report, arguments.model, threads):
        name = str(row["origin"].get("session") or row["origin"]["path"])
        drawn = int.from_bytes(blake3(name.encode("utf-8", "surrogatepass")).digest(8)) / 2**64
        parts[drawn < arguments.held_out].append(row | {"source": row["origin"].get("harness") or "sessions"})
    if not parts[False]:
        raise UserError(f"no row of these sessions can be learned from: {reasons(report.refused, report.first)}")
    _write(output, parts)
    files = ", ".join(f"{count} of {kind}" for kind, count in sorted(report.files.items())) or "none"
    print(f"{report.rows:,} rows with {report.learned:,} messages to learn from; files: {files}.")
    print("models: " + ", ".join(f"{model} ({count:,})" for model, count in report.models.most_common(_NAMED)))
    if report.secrets:
        print(f"{report.secrets.total():,} likely secrets were replaced; their messages are not learned from.")
    if report.refused:
        print(f"left out: {reasons(report.refused, report.first)}")


def _of_live_loop(config: Path, report: SessionReport) -> list[AgentThread]:
    from etude.cli.live import opened
    from etude.live.learn import LiveContents, consented_threads

    with opened(config) as loop:
        contents = LiveContents(loop.engine, loop.accounts, loop.contents)
        return list(consented_threads(loop.engine, contents, report))


def run_pull_requests(arguments: argparse.Namespace) -> None:
    """Writes the rows, and prints how many pull requests could not be told. Raises UserError."""
    from etude.cli.progress import bar
    from etude.code import clone_around, secret_in_json
    from etude.rollout import pull_request_rows, read_pull_requests

    output = new_rows_file(arguments.output)
    after = _date(arguments.hold_out_after)
    clone = clone_around(arguments.repository)
    if clone is None:
        raise UserError(f"{arguments.repository} is no git clone: name one")
    requests = read_pull_requests(clone, arguments.archive, commits=not arguments.no_commits)
    if not requests:
        raise UserError(f"{arguments.repository} has no pull request on its main line: drop --no-commits, if it is set")
    left_out: Counter[str] = Counter()
    parts: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    name = arguments.repository.resolve().name
    with bar() as progress:

        def each() -> Iterator[PullRequest]:
            for number, request in enumerate(requests):
                progress("pull requests", number, len(requests))
                yield request

        for row in pull_request_rows(clone, each(), left_out, seed=arguments.seed):
            if secret_in_json(row["messages"]) is not None:
                left_out["it holds a likely secret"] += 1
                continue
            origin = {"path": name, "licence": "own code", **row["origin"]}
            parts[after is not None and origin["date"] > after].append(row | {"source": name, "origin": origin})
    if not parts[False]:
        raise UserError(f"no pull request of {arguments.repository} can be told as edits: {reasons(left_out, {})}")
    _write(output, parts)
    print(f"{sum(map(len, parts.values())):,} of {len(requests):,} pull requests and commits are in {output}")
    if left_out:
        print(f"left out: {reasons(left_out, {})}")


def _date(text: str | None) -> str | None:
    import datetime

    if text is None:
        return None
    try:
        return datetime.date.fromisoformat(text).isoformat()
    except ValueError:
        raise UserError(f"--hold-out-after {text}: give a date, e.g. 2026-09-30") from None


def new_rows_file(output: Path) -> Path:
    """The path of a file of rows to write. Raises UserError for another kind of file, or if it is there."""
    if output.suffix != ".jsonl":
        raise UserError(f"-o {output}: the rows are JSON lines, name a file that ends in .jsonl")
    for path in (output, _held_out(output)):
        if path.exists():
            raise UserError(f"{path} exists: name another file, or remove it")
    return output


def _held_out(output: Path) -> Path:
    return output.with_name(f"{output.stem}.held_out.jsonl")


def _write(output: Path, parts: dict[bool, list[dict[str, Any]]]) -> None:
    """Writes the held-out rows first, so that the file that a stage trains on is never without them."""
    runfolder.make(output.parent)
    for held_out in (True, False):
        if parts[held_out]:
            path = _held_out(output) if held_out else output
            runfolder.write(path, _lines(parts[held_out]))


def _lines(rows: Iterable[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode("utf-8", "surrogatepass")


def reasons(counts: Counter[str], first: dict[str, str]) -> str:
    """The most frequent reasons with their counts, and the first place of each if it is known."""
    shown: Sequence[str] = [
        f"{count:,} because {why}" + (f" (first: {first[why]})" if why in first else "")
        for why, count in counts.most_common(_NAMED)
    ]
    return "; ".join(shown) or "they hold no answer of a model"
