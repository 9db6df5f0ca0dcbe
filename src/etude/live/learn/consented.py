"""The conversations of users who agree to training, as threads for a corpus (`etude corpus sessions --live`), and
their requests whose changes were committed, as words for tasks (`etude live requests`).

A turn is left out if its session has no consent, if consent was taken back since (the account was forgotten, or the
policy of the tenant no longer grants it), and if its content is gone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import sqlalchemy as sa

from etude.code import secret_in
from etude.corpus.sessions import AgentThread, SessionReport, answered_thread
from etude.live.learn.window import LiveContents
from etude.live.log import journal, tenants
from etude.live.log.consent import SCOPE
from etude.live.log.records import LivePolicy, ServedTurn, Session, TurnContent, TurnKind
from etude.live.observe.agent_trace import read_traces
from etude.protocol.apis import RequestRefused
from etude.renderers import content_text

MAX_REQUEST = 4000
"""Characters of a request that becomes the words of a task."""


def consented_threads(engine: sa.Engine, contents: LiveContents, report: SessionReport) -> Iterator[AgentThread]:
    """The thread of each main turn with consent, in order of time; the other turns are counted in the report. Raises
    UserError if the store of contents is away."""
    now = time.time_ns()
    with journal.reading(engine) as connection:
        stones = {stone.account for stone in journal.tombstones(connection, now)}
        policies = tenants.policies(connection)
        sessions = {each.id: each for each in journal.sessions(connection, now)}
        turns = list(journal.turns(connection, now))
    keys = contents.keys(session.account for session in sessions.values())
    for turn in turns:
        session = sessions[turn.session]
        key = None if session.account in stones else keys[session.account]
        why = _unwanted(turn, session, policies, key is None)
        data = None if why or key is None else contents.read(key, turn.blob or "")
        if data is None:
            report.refuse(turn.id, why or "its content is gone")
            continue
        content = msgspec.msgpack.decode(data, type=TurnContent)
        origin = {"path": turn.id, "session": session.id, "harness": session.client, "model": f"release {turn.release}"}
        replaced = any(f"<{rule}>".encode() in content.response for rule in turn.scrubbed)
        try:
            request, answer = msgspec.json.decode(content.request), msgspec.json.decode(content.response)
            reason = "scrubbed" if replaced else turn.stop
            yield answered_thread(content.dialect, request, answer, reason, origin)
        except (RequestRefused, msgspec.DecodeError) as e:
            report.refuse(turn.id, str(e))


def _unwanted(turn: ServedTurn, session: Session, policies: Mapping[str, LivePolicy], forgotten: bool) -> str:
    """The reason why a turn is left out, whatever its content, or ""."""
    consent, policy = session.consent, policies.get(session.tenant, LivePolicy())
    if not consent.granted or consent.scope != SCOPE:
        return "it has no consent"
    if forgotten or not (policy.consent or (policy.may_grant and consent.policy == "header")):
        return "consent was taken back"
    if turn.kind != TurnKind.MAIN:
        return "it is no turn of a person"
    return "" if turn.blob else "its content was not kept"


def committed_requests(
    engine: sa.Engine, contents: LiveContents, root: Path, report: SessionReport
) -> Iterator[dict[str, str]]:
    """Requests of users by the commit that holds the edits of their answers: {"commit", "request", "turn"}, the first
    turn of each commit that the traces in the tree `root` name (`.agent-trace`, written by `etude live watch`). A
    request with a likely secret, or of several kilobytes, is left out. Raises UserError."""
    words: dict[str, str] = {}
    for thread in consented_threads(engine, contents, report):
        texts = [content_text(message) for message in thread.messages if message["role"] == "user"]
        words[str(thread.origin["path"])] = texts[-1].strip() if texts else ""
    commits: dict[str, tuple[float, str]] = {}
    for edit in read_traces(root):
        if words.get(edit.turn):
            commits[edit.revision] = min(commits.get(edit.revision, (math.inf, "")), (edit.shown, edit.turn))
    for commit, (_, turn) in sorted(commits.items()):
        if len(words[turn]) > MAX_REQUEST or secret_in(words[turn].encode("utf-8", "surrogatepass")) is not None:
            report.refuse(turn, "its request is long, or holds a likely secret")
        else:
            yield {"commit": commit, "request": words[turn], "turn": turn}
