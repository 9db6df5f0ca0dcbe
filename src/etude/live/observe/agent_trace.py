"""Records of the authors of lines: Agent Trace, version 0.1.0 of January 2026
(https://github.com/cursor/agent-trace, README.md at 206a6b0).

They are written when followed edits are committed, one JSON line a commit in `.agent-trace/traces.jsonl`, and read in a
clone without the observer's state, as in CI. Lines are numbered from 1, at the record's revision. etude's identifiers
are in `metadata` under "dev.etude". The schema's pattern for `version` has two numbers, but its examples have three,
like the records here.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from etude.code import lines_of

TRACES = ".agent-trace/traces.jsonl"
VENDOR = "dev.etude"
MAX_BYTES = 64 << 20
_OURS = uuid.UUID("6f3c1d0e-3b0b-5d4e-9a59-1f0a7c2e7d11")


@dataclass(frozen=True)
class TracedEdit:
    """One range of a trace: lines `first` to `last`, from 1, of `path` at `revision`. Only etude's own records have
    `suggestion` and `shown` (seconds since the epoch)."""

    path: str
    revision: str
    first: int
    last: int
    turn: str
    model: str = ""
    suggestion: str = ""
    shown: float = 0.0


def trace_record(revision: str, edits: Sequence[TracedEdit], version: str, at: float) -> dict[str, Any]:
    """An Agent Trace record of the edits in a commit. Its id follows from commit and edits."""
    files: dict[str, dict[tuple[str, str], list[dict[str, Any]]]] = {}
    for edit in edits:
        span = {"start_line": edit.first, "end_line": edit.last}
        files.setdefault(edit.path, {}).setdefault((edit.turn, edit.model), []).append(span)
    name = json.dumps([revision, [(e.suggestion, e.path, e.first, e.last) for e in edits]])
    ours = [
        {"suggestion": e.suggestion, "turn": e.turn, "shown": e.shown, "path": e.path, "start_line": e.first}
        for e in edits
    ]
    return {
        "version": "0.1.0",
        "id": str(uuid.uuid5(_OURS, name)),
        "timestamp": datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        "vcs": {"type": "git", "revision": revision},
        "tool": {"name": "etude", "version": version},
        "files": [
            {
                "path": path,
                "conversations": [
                    {"url": f"urn:etude:turn:{turn}", "contributor": _contributor(model), "ranges": ranges}
                    for (turn, model), ranges in conversations.items()
                ],
            }
            for path, conversations in files.items()
        ],
        "metadata": {VENDOR: {"edits": ours}},
    }


def _contributor(model: str) -> dict[str, str]:
    return {"type": "ai"} | ({"model_id": model[:250]} if model else {})


def append_trace(root: Path, record: dict[str, Any]) -> None:
    """Appends a record to the tree's traces, unless they have a record with its id. A link is not followed."""
    place = root / TRACES
    if place.parent.is_symlink() or place.is_symlink():
        return
    place.parent.mkdir(exist_ok=True)
    if any(known.get("id") == record["id"] for known in _records(place)):
        return
    with place.open("a") as file:
        file.write(json.dumps(record, separators=(",", ":")) + "\n")


def read_traces(root: Path) -> list[TracedEdit]:
    """The edits of agents in the tree's Agent Trace records of version 0.x or 1.x. Malformed lines, and records without
    a git revision, are left out."""
    edits: list[TracedEdit] = []
    for record in _records(root / TRACES):
        try:
            if record["vcs"]["type"] != "git" or not re.match(r"[01]\.", record["version"]):
                continue
            entries = record.get("metadata", {}).get(VENDOR, {}).get("edits", [])
            ours = {(e["path"], e["turn"], int(e["start_line"])): e for e in entries}
            for file in record["files"]:
                for conversation in file["conversations"]:
                    edits += _ranges(str(record["vcs"]["revision"]), str(file["path"]), conversation, ours)
        except (KeyError, TypeError, ValueError, AttributeError):
            continue
    return edits


def _ranges(revision: str, path: str, conversation: dict[str, Any], ours: dict[Any, Any]) -> Iterable[TracedEdit]:
    turn = str(conversation.get("url") or "").removeprefix("urn:etude:turn:")
    for span in conversation["ranges"]:
        contributor = span.get("contributor") or conversation.get("contributor") or {}
        if contributor.get("type") not in ("ai", "mixed"):
            continue
        first, last = int(span["start_line"]), int(span["end_line"])
        known = ours.get((path, turn, first), {})
        model = str(contributor.get("model_id") or "")
        suggestion, shown = str(known.get("suggestion", "")), float(known.get("shown", 0.0))
        yield TracedEdit(path, revision, first, last, turn, model, suggestion, shown)


def _records(place: Path) -> list[dict[str, Any]]:
    try:
        if place.is_symlink() or place.stat().st_size > MAX_BYTES:
            return []
        lines = lines_of(place.read_bytes())
    except OSError:
        return []
    records: list[dict[str, Any]] = []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records
