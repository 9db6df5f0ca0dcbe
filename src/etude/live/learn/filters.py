"""The exits of a window: every turn is trained on, held or dropped for one reason. Pure functions.

The first reason that holds counts, in this order: consent, tombstones, scrubbing, missing tokens, kind of turn, bots,
duplicates, ratings of a request that dictates its answer, injected prompts, open outcomes, censored outcomes, the limit
of an account. A batch that is too small is held as a whole, with its censored turns: the weights of the next window
stand for them, too.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import blake3
import numpy as np

from etude.config.live import LabelsConfig
from etude.evals import ratio_p_value
from etude.live.learn import estimate
from etude.live.learn.attribution import labels
from etude.live.learn.content import RequestFeatures, clusters
from etude.live.log.consent import SCOPE
from etude.live.log.records import (
    ExitKind,
    Label,
    LabelState,
    ServedTurn,
    Session,
    Signal,
    SignalKind,
    Suggestion,
    TurnExit,
    TurnKind,
)

_BOT = re.compile(r"(?:^|[^a-z])(?:bot|ci|cron|dependabot|renovate|github-actions|gitlab-runner|jenkins)(?:$|[^a-z])")
_DAY = 86_400 * 10**9
_DEPTHS = 4  # cells by place in the session; later turns share the last cell


class ExitReason(StrEnum):
    """The reasons for which a turn is not trained on. Further reasons are that of a record without tokens, the kind of
    a turn other than a main turn, and those of `LiveContents` for missing content."""

    NO_CONSENT = "no_consent"
    TOMBSTONE = "tombstone"
    SCRUBBED = "scrubbed"
    NO_TOKENS = "no_tokens"
    BOT = "bot"
    DUPLICATE = "duplicate"
    VOTE_INJECTION = "vote_injection"
    INJECTED_PROMPT = "injected_prompt"
    CENSORED = "censored"
    COVERAGE = "coverage"  # censored: too few accounts rated similar requests
    ACCOUNT_CAP = "account_cap"
    SMALL_BATCH = "small_batch"
    NONE = ""  # of trained turns


_WAITS_FOR_BATCH = (ExitReason.NONE, ExitReason.CENSORED, ExitReason.ACCOUNT_CAP)
"""The reasons whose turns are held while a batch is too small."""


@dataclass(frozen=True)
class WindowRows:
    """The rows of the log before `cut`, and the accounts that were forgotten before `at`. `pending`: turns without a
    final exit; `turns` has the other turns of their sessions, too. `since`: the first time of each account that is
    vouched for."""

    number: int
    cut: int
    at: int
    sessions: Mapping[str, Session]
    turns: Sequence[ServedTurn]
    pending: frozenset[str]
    suggestions: Sequence[Suggestion]
    signals: Sequence[Signal]
    forgotten: frozenset[str]
    since: Mapping[str, int]


@dataclass(frozen=True)
class WindowDecision:
    """Labels and exits of a window, sorted by turn. Turns that were dropped whatever their outcome have no label."""

    labels: tuple[Label, ...]
    exits: tuple[TurnExit, ...]

    def trained(self) -> list[TurnExit]:
        """The exits of the batch, in its order."""
        return [e for e in self.exits if e.kind == ExitKind.TRAINED]


def unwanted(turn: ServedTurn, session: Session, rows: WindowRows) -> str:
    """The reason why a turn is not trained on, whatever its outcome and content, or ExitReason.NONE."""
    if not session.consent.granted or session.consent.scope != SCOPE:
        return ExitReason.NO_CONSENT
    if session.account in rows.forgotten:
        return ExitReason.TOMBSTONE
    if turn.scrubbed or turn.reason == ExitReason.SCRUBBED:
        return ExitReason.SCRUBBED
    if turn.blob is None or turn.reason:
        return turn.reason or ExitReason.NO_TOKENS
    if turn.kind != TurnKind.MAIN:
        return str(turn.kind)
    return ExitReason.BOT if _BOT.search(session.client.lower()) else ExitReason.NONE


def decide(rows: WindowRows, features: Mapping[str, RequestFeatures | str], config: LabelsConfig) -> WindowDecision:
    """Labels, exits, weights and advantages of a window. `features`: for turns that are not `unwanted`, their features,
    or the reason why the content is missing."""
    exits: dict[str, TurnExit] = {}

    def leave(turn: str, kind: ExitKind, reason: str) -> None:
        assert turn not in exits, "a turn leaves a window once"
        exits[turn] = TurnExit(turn=turn, window=rows.number, kind=kind, reason=str(reason))

    pending = sorted((t for t in rows.turns if t.id in rows.pending), key=lambda t: t.id)
    rated = {s.subject for s in rows.signals if s.kind == SignalKind.RATING and s.arrived_at <= rows.cut}
    seen: set[tuple[str, str]] = set()
    left: list[ServedTurn] = []
    kept: dict[str, RequestFeatures] = {}
    for turn in pending:
        session = rows.sessions[turn.session]
        reason = unwanted(turn, session, rows)
        if not reason:
            feature = features[turn.id]
            if isinstance(feature, str):
                reason = feature
            elif (session.voucher, feature.same) in seen:
                reason = ExitReason.DUPLICATE
            else:
                seen.add((session.voucher, feature.same))
                kept[turn.id] = feature
                if feature.votes and turn.id in rated:
                    reason = ExitReason.VOTE_INJECTION
                elif feature.injected:
                    reason = ExitReason.INJECTED_PROMPT
        if reason:
            leave(turn.id, ExitKind.DROPPED, reason)
        else:
            left.append(turn)
    counted = _counted(left, rows, kept, rated, config)
    made = labels(
        rows.sessions.values(),
        rows.turns,
        rows.suggestions,
        rows.signals,
        rows.cut,
        config,
        of=[t.id for t in left],
        rated=counted,
    )
    chosen = _choose(made, rows, {t.id: t for t in left}, config)
    trained = [label for label in made if chosen[label.turn][0] == ExitKind.TRAINED]
    small = len(trained) < config.least_batch
    edited = {s.turn for s in rows.suggestions}
    for label in made:
        kind, reason = chosen[label.turn]
        if small and reason in _WAITS_FOR_BATCH:
            kind, reason = ExitKind.HELD, ExitReason.SMALL_BATCH
        elif reason == ExitReason.CENSORED and label.turn in rated - counted - edited:
            reason = ExitReason.COVERAGE
        leave(label.turn, kind, reason)
    if not small:
        exits |= {e.turn: e for e in _weighted(trained, rows, {t.id: t for t in left}, kept, config)}
    return WindowDecision(tuple(made), tuple(exits[turn.id] for turn in pending))


def _numbers(names: Sequence[object]) -> np.ndarray:
    """int64 [N], the same for equal names."""
    known: dict[object, int] = {}
    return np.array([known.setdefault(name, len(known)) for name in names], np.int64)


def _counted(
    left: Sequence[ServedTurn],
    rows: WindowRows,
    kept: Mapping[str, RequestFeatures],
    rated: set[str],
    config: LabelsConfig,
) -> set[str]:
    """The turns whose ratings count."""
    if not left:
        return set()
    cluster = np.array(clusters([kept[t.id] for t in left]))
    sessions = [rows.sessions[t.session] for t in left]
    account, tenant = _numbers([s.voucher for s in sessions]), _numbers([s.tenant for s in sessions])
    is_rated = np.array([t.id in rated for t in left])
    counts = estimate.covered(cluster, account, tenant, is_rated, config.coverage)
    return {turn.id for turn, yes in zip(left, counts, strict=True) if yes}


def _choose(
    made: Sequence[Label], rows: WindowRows, turns: Mapping[str, ServedTurn], config: LabelsConfig
) -> dict[str, tuple[ExitKind, str]]:
    """The exit of each labelled turn in a batch that is large enough. A hash chooses the samples of an account, so that
    neither order nor outcome decides."""
    of = {LabelState.DROPPED: ExitKind.DROPPED, LabelState.OPEN: ExitKind.HELD, LabelState.CENSORED: ExitKind.DROPPED}
    out: dict[str, tuple[ExitKind, str]] = {
        x.turn: (of[x.state], x.reason or str(x.state)) for x in made if x.state in of
    }
    matured = [x.turn for x in made if x.state == LabelState.MATURED]
    account = _numbers([rows.sessions[turns[turn].session].voucher for turn in matured])
    order = np.array([int.from_bytes(blake3.blake3(t.encode()).digest(7)) for t in matured], np.int64)
    kept = estimate.first_of(account, order, config.per_account)
    for turn, yes in zip(matured, kept, strict=True):
        out[turn] = (ExitKind.TRAINED, ExitReason.NONE) if yes else (ExitKind.DROPPED, ExitReason.ACCOUNT_CAP)
    return out


def _weighted(
    trained: Sequence[Label],
    rows: WindowRows,
    turns: Mapping[str, ServedTurn],
    kept: Mapping[str, RequestFeatures],
    config: LabelsConfig,
) -> list[TurnExit]:
    """The exits of a batch, with weights (mean 1) and advantages."""
    sessions = [rows.sessions[turns[label.turn].session] for label in trained]
    place: dict[str, int] = {}
    depth: dict[str, int] = defaultdict(int)
    for turn in sorted(rows.turns, key=lambda t: (t.session, t.sequence, t.id)):
        if turn.kind == TurnKind.MAIN and turn.at <= rows.cut:
            place[turn.id] = min(depth[turn.session], _DEPTHS - 1)
            depth[turn.session] += 1
    cell = _numbers([(s.tenant, kept[x.turn].intent, place[x.turn]) for x, s in zip(trained, sessions, strict=True)])
    days = np.array([(rows.cut - rows.since[s.voucher]) / _DAY for s in sessions])
    weight = np.array([label.weight for label in trained]) * estimate.age_weights(days, config.age_days)
    account, tenant = _numbers([s.voucher for s in sessions]), _numbers([s.tenant for s in sessions])
    names = _numbers([s.organisation for s in sessions])
    organisation = np.where(np.array([not s.organisation for s in sessions]), -1, names)
    shares = config.account_share, config.organisation_share, config.tenant_share
    weight = estimate.shares_capped(weight, account, organisation, tenant, *shares)
    reward = np.array([label.reward for label in trained])
    gain = reward - estimate.baselines(reward, weight, cell, config.shrinkage, config.trim)
    return [
        TurnExit(turn=x.turn, window=rows.number, kind=ExitKind.TRAINED, weight=float(w), advantage=float(a))
        for x, w, a in zip(trained, weight, gain, strict=True)
    ]


def drop_rates(turns: Sequence[ServedTurn], exits: Sequence[TurnExit]) -> dict[str, dict[int, tuple[int, int]]]:
    """For each reason and version: the number of dropped turns, and of all turns with a final exit. A version whose
    turns are dropped more often than another's is no fair sample, and should not be learned from."""
    version = {turn.id: max((span.version for span in turn.spans), default=-1) for turn in turns}
    final = [e for e in exits if e.kind != ExitKind.HELD]
    total: dict[int, int] = defaultdict(int)
    dropped: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for each in final:
        total[version[each.turn]] += 1
        if each.kind == ExitKind.DROPPED:
            dropped[each.reason][version[each.turn]] += 1
    return {reason: {v: (by[v], total[v]) for v in sorted(total)} for reason, by in sorted(dropped.items())}


def suspicious(rates: Mapping[str, Mapping[int, tuple[int, int]]]) -> list[str]:
    """The reasons for which versions' turns are dropped at different rates: a chi-square test, at 0.001 over all."""
    out: list[str] = []
    for reason, by in rates.items():
        dropped, total = zip(*by.values(), strict=True)
        if len(by) > 1 and ratio_p_value(dropped, total) < 0.001 / len(rates):
            out.append(reason)
    return out
