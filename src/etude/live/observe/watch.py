"""`etude live watch REPO`: the fates of edits by answers of the gateway.

    the tree changes while the actions of an answer run  ->  edits of that turn: shown, applied
    2 min, 30 min, 24 h later                            ->  survived (share of the characters)
    a person reverts, or a later turn replaces an edit   ->  undone, overwritten
    a commit, the remote's main branch, a later commit   ->  committed, merged, reverted
    the watcher ends, or was away                        ->  gone

The watcher runs on the developer's machine, or with `--once` in CI. A project takes part by the checked-in file
`.etude/consent.toml`; paths that the file excludes are never read. Agents report the times of an answer's actions
(`agents`); a change of a file within that time is an edit of that turn, any other change is a person's. If two turns
may have made a change, the later turn gets it with a confidence of one half. A change together with HEAD or the stash
was made by git: it neither makes nor undoes an edit.

The identifiers of events follow from the edit, so that the gateway ignores repeated events (`spool`).
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from etude.live.log.records import SignalKind, ulid_of
from etude.live.observe import survival
from etude.live.observe.agent_trace import TracedEdit, append_trace, read_traces, trace_record
from etude.live.observe.agents import AgentFile, AgentStep
from etude.live.observe.project import CONSENT, ProjectConsent, read_consent
from etude.live.observe.spool import MAX_CHARACTERS, MAX_EDITS, MAX_WAITING, WatchedEdit, WatchState
from etude.live.observe.watched_files import FileWatch, PendingChange, Stamp
from etude.live.observe.worktree import TextRepository, TreeState

HORIZONS = (120.0, 1800.0, 86_400.0)
FOLLOWED = 14 * 86_400.0  # seconds for which an edit is followed
PATIENCE = 600.0  # seconds for which a change waits for an agent's report
SLACK = 0.05  # seconds by which a file's time, from a coarse clock, and an agent's may differ on one machine
_ULID, _COMMIT = re.compile(r"[0-7][0-9A-HJKMNP-TV-Z]{25}"), re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass
class WatchCounts:
    """The counts that the command prints at its end."""

    edits: int = 0
    signals: int = 0
    unfollowed: int = 0
    """Edits that are not followed: too many at once, or files too long."""
    lines_refused: int = 0


@dataclass
class Watcher:
    """The watcher of a repository, whose `look` is called again and again. `now` is the clock, in seconds."""

    repository: TextRepository
    state: WatchState
    consent: ProjectConsent
    agents: list[AgentFile]
    now: Callable[[], float] = time.time
    counts: WatchCounts = field(default_factory=WatchCounts)
    version: str = ""
    _pending: list[PendingChange] = field(default_factory=list[PendingChange])
    _edits: dict[str, WatchedEdit] = field(default_factory=dict[str, WatchedEdit])
    _consent_stamp: Stamp | None = None

    def __post_init__(self) -> None:
        self._files = FileWatch(self.repository, self.state, self.consent.exclude, self.now)

    def start(self) -> None:
        """Continues from the state of the last process. Horizons that nobody observed are reported as gone."""
        self._edits = {edit.id: edit for edit in self.state.edits()}
        self._consent_stamp = self._files.stamp(CONSENT)
        last = self.state.mark("seen")
        with self.state.step():
            if not last:
                self._files.look(lambda: False, first=True)
                self._set_tree(replace(self.repository.state(), mainline=""))
                self.state.set_mark("seen", repr(self.now()))
            else:
                self._close_missed(float(last))
            self._import_traces()
        self._pending = [PendingChange(**change) for change in json.loads(self.state.mark("pending", "[]"))]

    def look(self) -> None:
        """One look: reads agents' reports, files and commits, and reports horizons. Does nothing while too many signals
        wait for the gateway. Raises UserError if the project has withdrawn its consent."""
        if (stamp := self._files.stamp(CONSENT)) != self._consent_stamp:
            self.consent, self._consent_stamp = read_consent(self.repository), stamp
            self._files.exclude = self.consent.exclude
        if self.state.count() >= MAX_WAITING:
            return
        with self.state.step():
            for agent in self.agents:
                for signal in agent.read():
                    self._emit(signal.line, signal.turn, signal.kind, signal.value, turn=signal.turn, source="client")
            self.counts.lines_refused = sum(agent.refused for agent in self.agents)
            tree = self.repository.state()
            self._look_at_files(tree)
            known = set(self._edits)
            self._resolve()
            self._look_at_commits(tree, [edit for name, edit in self._edits.items() if name not in known])
            self._look_at_horizons(tree)
            self.state.set_mark("seen", repr(self.now()))

    def stop(self) -> None:
        """Reports that open edits are no longer observed."""
        with self.state.step():
            self._resolve(finally_=True)
            for edit in self._edits.values():
                if not edit.undone and HORIZONS[1] not in edit.horizons:
                    self._report(edit, SignalKind.GONE, 1.0, name=f"gone:{self.now():.0f}")

    # Files ------------------------------------------------------------------------------------------------------------

    def _look_at_files(self, tree: TreeState) -> None:
        """Adds the changes since the last look to the pending changes, and follows renamed files."""
        changed = self._files.look(lambda: self._moved_by_git(tree))
        for edit in self._edits.values():
            if edit.path in changed.renames:
                edit.path = changed.renames[edit.path]
                self.state.put(edit)
        self._pending += changed.changes

    def _moved_by_git(self, tree: TreeState) -> bool:
        """Whether git changed files since the last look: by the checkout of an older commit, or by a stash. A commit
        made since then has changes of an agent or a person."""
        before = self._tree()
        made_since = self.repository.committed_at(tree.head) >= float(self.state.mark("seen", "0")) - 1
        return tree.stash != before.stash or (tree.head != before.head and not made_since)

    # Makers of changes ------------------------------------------------------------------------------------------------

    def _resolve(self, finally_: bool = False) -> None:
        """Assigns pending changes to turns or to a person. With `finally_`, no change stays pending."""
        steps = sorted((s for agent in self.agents for s in agent.steps.values()), key=lambda s: s.started)
        waiting: list[PendingChange] = []
        for change in self._pending:
            if any(earlier.path == change.path for earlier in waiting):
                waiting.append(change)
                continue
            away = [(max(s.started - change.at, change.at - s.ended, 0.0), s) for s in steps]
            nearest = min((seconds for seconds, _ in away), default=SLACK + 1)
            if nearest <= SLACK:
                makers = [step for seconds, step in away if seconds == nearest]
                self._edit_of_turn(change, makers[-1], 1.0 if len(makers) == 1 else 0.5)
            elif finally_ or self._is_persons(change, steps):
                self._edit_of_person(change)
            else:
                waiting.append(change)
        if waiting or self._pending:
            self.state.set_mark("pending", json.dumps([asdict(change) for change in waiting]))
        self._pending = waiting

    def _is_persons(self, change: PendingChange, steps: list[AgentStep]) -> bool:
        """Whether a change is a person's: every agent has reported a later action or has ended, or PATIENCE is over."""
        if self.now() - change.at > PATIENCE:
            return True
        return all(
            agent.ended is not None or any(step.started > change.at + SLACK for step in agent.steps.values())
            for agent in self.agents
        )

    def _edit_of_turn(self, change: PendingChange, step: AgentStep, confidence: float) -> None:
        for edit in list(self._edits.values()):
            if edit.path == change.path and edit.turn != step.turn:
                self._overwritten(edit, change, step.turn)
        try:
            hunks = survival.hunks(change.before, change.after)
        except ValueError:
            self.counts.unfollowed += 1
            return
        base = _digest(change.before)
        size = sum(len(edit.before) + len(edit.applied) for edit in self._edits.values())
        for hunk in hunks:
            span = f"{hunk.first}+{len(hunk.old)}"
            digest = _digest(step.turn, change.path, base, span, "\n".join(hunk.new))
            name = ulid_of((round(change.at * 1000) << 80) | int(digest[:20], 16))
            size += len(change.before) + len(change.after)
            if len(self._edits) >= MAX_EDITS or size > MAX_CHARACTERS:
                self.counts.unfollowed += 1
                continue
            if self.state.known(name):
                continue
            edit = WatchedEdit(
                id=name,
                turn=step.turn,
                model=step.model,
                path=change.path,
                branch=self._tree().branch,
                before=change.before,
                applied=change.after,
                first=hunk.first,
                old=len(hunk.old),
                place=hunk.place,
                new=len(hunk.new),
                shown=change.at,
                confidence=confidence,
            )
            self._edits[name] = edit
            self.state.put(edit)
            self.counts.edits += 1
            suggestion = {
                "id": name,
                "turn": step.turn,
                "path": change.path,
                "base": base,
                "old_lines": [hunk.first, len(hunk.old)],
                "new": _digest("\n".join(hunk.new)),
                "characters": survival.characters(hunk.new),
            }
            self._report(edit, SignalKind.SHOWN, 1.0, at=change.at, suggestion=suggestion)
            self._report(edit, SignalKind.APPLIED, 1.0, at=change.at)

    def _overwritten(self, edit: WatchedEdit, change: PendingChange, turn: str) -> None:
        was = survival.fate(edit.before, edit.applied, edit.hunk, change.before)[0]
        lost = max(0.0, was - survival.fate(edit.before, edit.applied, edit.hunk, change.after)[0])
        if lost > 0:
            edit.overwritten = min(1.0, edit.overwritten + lost)
            self.state.put(edit)
            self._report(edit, SignalKind.OVERWRITTEN, lost, at=change.at, name=f"overwritten:{turn}")

    def _edit_of_person(self, change: PendingChange) -> None:
        """Reports the edits that a person's change undoes."""
        for edit in list(self._edits.values()):
            if edit.path != change.path or edit.undone or edit.overwritten > 1 - survival.GONE:
                continue
            _, fate = survival.fate(edit.before, edit.applied, edit.hunk, change.after)
            if fate == "undone":
                edit.undone = True
                self.state.put(edit)
                self._report(edit, SignalKind.UNDONE, 1.0, at=change.at)

    # Commits ----------------------------------------------------------------------------------------------------------

    def _look_at_commits(self, tree: TreeState, new: list[WatchedEdit]) -> None:
        """Reports commits, merges and reverts. `new`: edits of this look, which may have been committed before it."""
        before = self._tree()
        if tree.head != before.head:
            same = tree.branch == before.branch
            for commit in self.repository.commits(before.head if same else "", tree.head):
                self._look_at_commit(commit, tree.branch, self._edits.values(), self.repository.changes(commit))
        elif new and tree.head:
            self._look_at_commit(tree.head, tree.branch, new, {edit.path: edit.path for edit in new})
        if tree != before:
            self._set_tree(tree)
        if tree.mainline and (tree.mainline != before.mainline or self.state.mark("imported")):
            self.state.set_mark("imported", "")
            for edit in list(self._edits.values()):
                self._look_at_mainline(edit, tree.mainline)

    def _look_at_commit(
        self, commit: str, branch: str, edits: Iterable[WatchedEdit], changed: Mapping[str, str]
    ) -> None:
        """Reports the edits that a commit contains or reverts. `changed`: path -> path before the commit."""
        made = self.repository.committed_at(commit)
        traced: list[TracedEdit] = []
        for edit in edits:
            path = next((new for new, old in changed.items() if edit.path in (new, old)), None)
            if path is None:
                continue
            text = self.repository.text_at(commit, path) or ""
            share, fate = survival.fate(edit.before, edit.applied, edit.hunk, text)
            if edit.committed:
                if fate == "undone" and not edit.reverted and self.repository.is_behind(edit.committed, commit):
                    edit.reverted = True
                    self._report(edit, SignalKind.REVERTED, 1.0, source="git")
            elif share > survival.GONE and made >= edit.shown - 1:
                edit.committed, edit.branch = commit, branch
                self._report(edit, SignalKind.COMMITTED, share, source="git", confidence=edit.confidence)
                traced += _where(edit, path, commit, text)
            self.state.put(edit)
        if traced and self.consent.traces:
            append_trace(self.repository.root, trace_record(commit, traced, self.version, self.now()))

    def _look_at_mainline(self, edit: WatchedEdit, mainline: str) -> None:
        if not edit.committed:
            return
        text = self.repository.text_at(mainline, edit.path)
        share, fate = survival.fate(edit.before, edit.applied, edit.hunk, text or "")
        if not edit.merged and share > survival.GONE and text is not None:
            edit.merged = True
            self._report(edit, SignalKind.MERGED, share, source="git")
        elif edit.merged and not edit.reverted and fate == "undone":
            edit.reverted = True
            self._report(edit, SignalKind.REVERTED, 1.0, source="git")
        self.state.put(edit)

    def _import_traces(self) -> None:
        """Follows edits from etude's Agent Trace records, for clones without state, as in CI. Anyone may write such
        records: identifiers of another form go neither to git nor to the terminal."""
        for traced in read_traces(self.repository.root):
            if not (_ULID.fullmatch(traced.suggestion) and _COMMIT.fullmatch(traced.revision)):
                continue
            if (
                self.state.known(traced.suggestion)
                or not self._files.watched(traced.path)
                or len(self._edits) >= MAX_EDITS
            ):
                continue
            applied = self.repository.text_at(traced.revision, traced.path)
            before = self.repository.text_at(f"{traced.revision}^", traced.path) or ""
            if applied is None:
                continue  # the revision is not in this clone
            try:
                hunks = survival.hunks(before, applied)
            except ValueError:  # too long
                continue
            for hunk in hunks:
                if hunk.place + 1 <= traced.last and traced.first <= hunk.place + max(1, len(hunk.new)):
                    edit = WatchedEdit(
                        id=traced.suggestion,
                        turn=traced.turn,
                        model=traced.model,
                        path=traced.path,
                        branch=self._tree().branch,
                        before=before,
                        applied=applied,
                        first=hunk.first,
                        old=len(hunk.old),
                        place=hunk.place,
                        new=len(hunk.new),
                        shown=traced.shown,
                        horizons=HORIZONS,
                        committed=traced.revision,
                    )
                    self._edits[edit.id] = edit
                    self.state.put(edit)
                    self.state.set_mark("imported", "1")
                    break

    # Horizons ---------------------------------------------------------------------------------------------------------

    def _look_at_horizons(self, tree: TreeState) -> None:
        for edit in list(self._edits.values()):
            for horizon in HORIZONS:
                late = self.now() - edit.shown - horizon
                if horizon in edit.horizons or late < 0:
                    continue
                edit.horizons = (*edit.horizons, horizon)
                text = self._text_now(edit, tree)
                if text is None or late > 60 + horizon / 10:
                    self._report(edit, SignalKind.GONE, 1.0, name=f"gone:{horizon:.0f}")
                else:
                    share, _ = survival.fate(edit.before, edit.applied, edit.hunk, text)
                    name = f"survived:{horizon:.0f}"
                    self._report(edit, SignalKind.SURVIVED, share, name=name, horizon=horizon)
                self.state.put(edit)
            done = len(edit.horizons) == len(HORIZONS) and (edit.undone or edit.reverted or edit.overwritten >= 1)
            if done or self.now() - edit.shown > FOLLOWED:
                self.state.drop(edit)
                del self._edits[edit.id]

    def _text_now(self, edit: WatchedEdit, tree: TreeState) -> str | None:
        """The present text of the edit's file: in the tree, or in the edit's branch if another branch is checked out.
        None for an unreadable text."""
        if tree.branch == edit.branch:
            return self._files.text(edit.path)
        return self.repository.text_at(edit.branch, edit.path) if edit.committed and edit.branch != "HEAD" else None

    def _close_missed(self, last: float) -> None:
        for edit in self._edits.values():
            missed = [h for h in HORIZONS if h not in edit.horizons and self.now() - edit.shown - h > 60 + h / 10]
            for horizon in missed:
                edit.horizons = (*edit.horizons, horizon)
                self._report(edit, SignalKind.GONE, 1.0, at=last, name=f"gone:{horizon:.0f}")
            if missed:
                self.state.put(edit)

    # Signals ----------------------------------------------------------------------------------------------------------

    def _report(
        self,
        edit: WatchedEdit,
        kind: SignalKind,
        value: float,
        *,
        at: float | None = None,
        name: str = "",
        source: str = "client",
        horizon: float | None = None,
        suggestion: Mapping[str, Any] | None = None,
        confidence: float | None = None,
    ) -> None:
        more: dict[str, Any] = {"confidence": edit.confidence if confidence is None else confidence}
        if horizon is not None:
            more["horizon"] = horizon
        if suggestion is not None:
            more["suggestion"] = dict(suggestion)
        event = _digest(edit.id, name or kind.value)
        self._emit(event, edit.id, kind, value, turn=edit.turn, at=at, source=source, **more)

    def _emit(
        self,
        event: str,
        subject: str,
        kind: SignalKind,
        value: float,
        *,
        at: float | None = None,
        source: str,
        **more: Any,
    ) -> None:
        observed = round((self.now() if at is None else at) * 1e9)
        body = {"subject": subject, "kind": kind.value, "value": round(value, 6), "observed_at": observed}
        self.state.emit(event, body | {"source": source} | more)
        self.counts.signals += 1

    def _tree(self) -> TreeState:
        return TreeState(**json.loads(self.state.mark("tree")))

    def _set_tree(self, tree: TreeState) -> None:
        self.state.set_mark("tree", json.dumps(asdict(tree)))


def _where(edit: WatchedEdit, path: str, commit: str, text: str) -> Iterable[TracedEdit]:
    """The range of a commit's lines that holds the edit, from its first applied line to its last."""
    lines, wanted = survival.lines_of(text), {line for line in edit.hunk.new if line.strip()}
    matches = [number for number, line in enumerate(lines, 1) if line in wanted]
    if matches:
        drift = max(edit.new, 1) + abs(len(lines) - len(survival.lines_of(edit.applied)))
        near = [number for number in matches if abs(number - 1 - edit.place) <= drift]
        span = near or matches
        yield TracedEdit(path, commit, span[0], span[-1], edit.turn, edit.model, edit.id, edit.shown)


def _digest(*parts: str) -> str:
    return hashlib.blake2b("\0".join(parts).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def open_watcher(root: Path, agents: Iterable[Path], now: Callable[[], float] = time.time) -> Watcher:
    """A started watcher of the repository at `root`. Raises UserError."""
    from importlib.metadata import version

    repository = TextRepository(root)
    consent = read_consent(repository)
    files = [AgentFile(path) for path in agents]
    watcher = Watcher(repository, WatchState(repository.root), consent, files, now, version=version("etude"))
    watcher.start()
    return watcher
