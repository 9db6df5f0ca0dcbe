"""Thresholds on the figures of a step, and the actions when one is crossed: warn, skip, roll back, halt.

    warn      an event in metrics.jsonl and the log; the step goes on
    skip      the gradients are dropped: the next version has the weights of this one, its groups are consumed
    rollback  the weights and the optimizer of the last good version are published as the next version
    halt      nothing is consumed or published: the run stops with its state saved

A version is good once the step from it crossed no `stop` threshold. Consecutive skips lead to a rollback, consecutive
rollbacks to a halt, so that no run goes on for ever without learning. All memory comes from the `StepRecord`s in the
manifests of the versions, so a resumed run judges like an uninterrupted one. No torch here.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Literal

from etude.config import Guard, GuardsConfig
from etude.records import StepAction, StepRecord

if TYPE_CHECKING:
    from etude.trainer.rl.mismatch import MismatchMeans

_ORDER: tuple[StepAction, ...] = ("go", "skip", "rollback", "halt")
ROLLBACK_AFTER = 3  # consecutive skipped steps that lead to a rollback
_LOW = frozenset({"correlation", "ess"})  # these must not fall, all others must not rise
_FLOOR = 5e-5  # k2 at a standard deviation of .01; growth below it is due to rounding
_UNKNOWN = 10 * _FLOOR  # assumed usual k2 of probes until 5 are known
_SENTENCES = {
    "lag": "tokens lag {value:.0f} versions behind the trainer, the bound is {threshold:.0f}",
    "kv_lag": "a token saw keys {value:.0f} versions older than its own, {threshold:.0f} can be: a stale prefix cache?",
    "probe_growth": "the engine at {engine} scores the probes of version {version} otherwise than the trainer: "
    "k2 {k2:.2g} is {value:.1f} times the usual, threshold {threshold:.1f}",
    "mismatch_k2": "trainer and engine disagree on tokens of one version: k2 {value:.2g}, threshold {threshold:.2g}",
    "mismatch_growth": "the mismatch is {value:.1f} times that of the first steps, threshold {threshold:.1f}",
    "tail_ln2": "{value:.2%} of the tokens differ by more than a factor of 2, threshold {threshold:.2%}",
    "tail_dp": "{value:.2%} of the tokens differ by more than .1 in probability, threshold {threshold:.2%}",
    "correlation": "the probabilities of trainer and engine correlate at {value:.4f}, threshold {threshold:.4f}",
    "ess": "importance weights leave an effective sample of {value:.2%}, threshold {threshold:.2%}",
    "weight_cut": "{value:.2%} of the importance weights were cut, threshold {threshold:.2%}",
    "grad_norm": "the gradient norm is {value:.1f} times its median, threshold {threshold:.1f}",
    "empty": "{value:.0%} of the episodes sampled no token and count all the same",
    "zero_variance": "{value:.0%} of the groups teach nothing, threshold {threshold:.0%}",
    "non_finite": "the gradient is not finite",
    "routes_missing": "{value:.2%} of the tokens have no recorded experts to replay, threshold {threshold:.2%}",
    "routes_refused": "{value:.2%} of the recorded experts are implausible to the trainer, threshold {threshold:.2%}",
    "numerics": "deterministic trainer and engine differ by {value:.2g} in a log-probability: other processors?",
}


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """The figures of a step for the guards. None: not measured, so no threshold is crossed."""

    lag: float | None = None  # versions; the largest of all trained tokens
    kv_lag: float | None = None  # versions between a token and the oldest keys that it saw; the largest
    empty: float | None = None  # share of the episodes that sampled no token
    zero_variance: float | None = None  # share of the groups without enough reward variance
    weight_cut: float | None = None  # share of the importance weights that the loss cut
    weight_ess: float | None = None  # effective share of tokens under the importance weights
    routes_missing: float | None = None  # share of the tokens without recorded experts
    routes_refused: float | None = None  # share of the recorded experts that are implausible to the trainer
    mismatch: MismatchMeans | None = None  # of the tokens that the trained version itself sampled
    grad_norm: float | None = None  # before clipping; may be NaN


@dataclass(frozen=True)
class ProbeComparison:
    """An engine's scores of the logprob probes under a version against the trainer's: k2, and the largest
    difference."""

    engine: str
    version: int
    k2: float
    max_abs: float


@dataclass(frozen=True)
class GuardEvent:
    """A threshold that a step crossed. `action` is the action of the threshold."""

    guard: str
    level: Literal["warn", "stop"]
    value: float
    threshold: float
    action: StepAction
    sentence: str


@dataclass(frozen=True)
class GuardVerdict:
    """The action for a step, and its reasons."""

    action: StepAction
    events: tuple[GuardEvent, ...]

    @property
    def trains(self) -> bool:
        """Whether the step updates the weights."""
        return self.action == "go"

    def count(self, level: Literal["warn", "stop"]) -> int:
        """Number of events of this level."""
        return sum(event.level == level for event in self.events)


class Guards:
    """Judges the steps of a run. `history` has the record of every published step, oldest first. `exact`: trainer and
    engine promise equal bits."""

    def __init__(
        self, config: GuardsConfig, staleness: int, history: Sequence[StepRecord] = (), *, exact: bool = False
    ):
        self._config = config
        self._staleness = staleness
        self._exact = exact
        self._norms: deque[float] = deque(maxlen=config.window)
        self._first: list[float] = []  # mismatch k2 of the first steps
        self._probes: list[float] = []  # k2 of the first steps that had probes
        self.good = 0
        self._skips = self._rollbacks = 0
        for record in history:
            self.remember(record)

    def judge(self, figures: StepFigures, probes: Sequence[ProbeComparison] = ()) -> GuardVerdict:
        """The verdict on a step with these figures. `probes` are those that have arrived since the previous step,
        perhaps of older versions."""
        events = [event for name, value in self._values(figures).items() for event in self._crossed(name, value)]
        usual = max(median(self._probes), _FLOOR) if len(self._probes) >= 5 else _UNKNOWN
        events += [e for p in probes for e in self._crossed("probe_growth", p.k2 / usual, **vars(p))]
        action: StepAction = _ORDER[max((_ORDER.index(event.action) for event in events), default=0)]
        if not self._config.act:
            action = "go"
        if action == "skip" and self._skips + 1 >= ROLLBACK_AFTER:
            action = "rollback"
        if action == "rollback" and self._rollbacks >= self._config.halt_after:
            action = "halt"
        return GuardVerdict(action, tuple(events))

    def record(
        self, version: int, verdict: GuardVerdict, figures: StepFigures, probes: Sequence[ProbeComparison] = ()
    ) -> StepRecord:
        """The record of the step from `version`, for the manifest of the next version and for `remember`."""
        norm, mismatch = figures.grad_norm, figures.mismatch
        return StepRecord(
            action=verdict.action,
            good=self.good if verdict.count("stop") else version,
            grad_norm=norm if norm is not None and math.isfinite(norm) else None,
            mismatch_k2=mismatch.k2 if mismatch is not None and self._enough(mismatch) else None,
            probe_k2=max((probe.k2 for probe in probes), default=None),
        )

    def remember(self, record: StepRecord) -> None:
        """Adds the record of a step whose version is published to the history."""
        self.good = record.good
        self._skips = self._skips + 1 if record.action == "skip" else 0
        self._rollbacks = 0 if record.action == "go" else self._rollbacks + (record.action == "rollback")
        if record.action == "go" and record.grad_norm is not None and record.grad_norm > 0:
            self._norms.append(record.grad_norm)
        if len(self._first) < self._config.baseline and record.mismatch_k2 is not None:
            self._first.append(record.mismatch_k2)
        if len(self._probes) < self._config.baseline and record.probe_k2 is not None:
            self._probes.append(record.probe_k2)

    def _enough(self, mismatch: MismatchMeans) -> bool:
        return mismatch.tokens >= self._config.min_tokens

    def _values(self, figures: StepFigures) -> dict[str, float]:
        """The guarded figures of this step, by the name of their guard."""
        mismatch, norm = figures.mismatch, figures.grad_norm
        names = ("lag", "kv_lag", "empty", "weight_cut", "routes_missing", "routes_refused", "zero_variance")
        values: dict[str, float | None] = {name: getattr(figures, name) for name in names}
        if mismatch is not None and self._exact:
            values["numerics"] = mismatch.max_abs
        if norm is not None:
            values["non_finite"] = float(not math.isfinite(norm))
            if len(self._norms) >= 5:
                values["grad_norm"] = norm / median(self._norms)
        if mismatch is not None:
            enough = self._enough(mismatch)
            # Few tokens are judged as if others had agreed exactly: n of them may differ by as much in sum as
            # `min_tokens` may, so the bound on their mean widens by min_tokens / n.
            mismatch = mismatch if enough else mismatch.filled(self._config.min_tokens)
            values |= {
                "mismatch_k2": mismatch.k2,
                "tail_ln2": mismatch.p_ln2,
                "tail_dp": mismatch.p_dp,
                "correlation": mismatch.corr,
                "ess": figures.weight_ess if enough and figures.weight_ess is not None else mismatch.ess,
            }
            if len(self._first) >= 5:
                values["mismatch_growth"] = mismatch.k2 / max(median(self._first), _FLOOR)
        return {name: value for name, value in values.items() if value is not None}

    def _crossed(self, name: str, value: float, **details: object) -> list[GuardEvent]:
        """At most one event, the more severe one, if a threshold is crossed. `details` are for its sentence."""
        guard: Guard = getattr(self._config, name)
        stop = float(self._staleness) if name == "lag" and guard.stop is None else guard.stop
        # An episode's keys are no older than its admission, from which its last token is at most the bound away.
        warn = float(self._staleness) if name == "kv_lag" and guard.warn is None else guard.warn
        for level, threshold in (("stop", stop), ("warn", warn)):
            if threshold is not None and (value < threshold if name in _LOW else value > threshold):
                action: StepAction = "go" if level == "warn" or guard.action == "warn" else guard.action
                sentence = _SENTENCES[name].format(value=value, threshold=threshold, **details)
                return [GuardEvent(name, "stop" if level == "stop" else "warn", value, threshold, action, sentence)]
        return []
