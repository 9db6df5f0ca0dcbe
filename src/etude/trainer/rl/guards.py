"""Thresholds on the figures of a step, and what is done when one is crossed: warn, skip, roll back, halt.

    warn      an event in metrics.jsonl and the log; the step goes on
    skip      the gradients are dropped: the next version has the weights of this one, its groups are consumed
    rollback  the weights and the optimizer of the last good version are published as the next version
    halt      nothing is consumed or published: the run stops with its state saved

A version is good once the step from it crossed no `stop` threshold. Skips in a row lead to a rollback, rollbacks in a
row to a halt, so that no run goes on for ever without learning. All memory comes from the metrics in the manifests of
the versions, so a resumed run judges as an uninterrupted one. No torch here.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from etude.config import Guard, GuardsConfig

Action = Literal["go", "skip", "rollback", "halt"]
_ORDER: tuple[Action, ...] = ("go", "skip", "rollback", "halt")
_LOW = frozenset({"correlation", "ess"})  # these must not fall, all others must not rise
_FLOOR = 5e-5  # k2 at a standard deviation of .01: growth below it is growth of rounding
_UNKNOWN = 10 * _FLOOR  # k2 of canaries that is taken for usual while fewer than 5 have been seen
_SENTENCES = {
    "lag": "tokens lag {value:.0f} versions behind the trainer, the bound is {threshold:.0f}",
    "kv_lag": "a token saw keys {value:.0f} versions older than its own, {threshold:.0f} can be: a stale prefix cache?",
    "probe_growth": "the engine at {engine} scores the canaries of version {version} otherwise than the trainer: "
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


@dataclass(frozen=True)
class Canary:
    """How an engine scored the fixed sequences under a version, against the trainer: k2, and the largest difference."""

    engine: str
    version: int
    k2: float
    max_abs: float


@dataclass(frozen=True)
class Event:
    """A threshold that a step crossed. `action` is what it asks for."""

    guard: str
    level: Literal["warn", "stop"]
    value: float
    threshold: float
    action: Action
    sentence: str


@dataclass(frozen=True)
class GuardVerdict:
    """What happens to a step, and why."""

    action: Action
    events: tuple[Event, ...]

    @property
    def trains(self) -> bool:
        return self.action == "go"


class Guards:
    """Judges the steps of a run. `history` is the metrics of every published version, oldest first.

    `exact`: trainer and engine promise equal bits.
    """

    def __init__(
        self, config: GuardsConfig, staleness: int, history: Sequence[Mapping[str, float]] = (), *, exact: bool = False
    ):
        self._config = config
        self._staleness = staleness
        self._exact = exact
        self._norms: deque[float] = deque(maxlen=config.window)
        self._first: list[float] = []
        self._canaries: list[float] = []  # k2 of the first steps that had some
        self.good = 0
        self._skips = self._rollbacks = 0
        for metrics in history:
            self._remember(metrics)

    def judge(self, metrics: Mapping[str, float], canaries: Sequence[Canary] = ()) -> GuardVerdict:
        """What to do with a step that measured this. Figures that were not measured cross nothing.

        `canaries` are those that have arrived since the step before: of versions that may be older than the step's.
        """
        events = [event for name, value in self._values(metrics).items() for event in self._crossed(name, value)]
        usual = max(median(self._canaries), _FLOOR) if len(self._canaries) >= 5 else _UNKNOWN
        events += [e for c in canaries for e in self._crossed("probe_growth", c.k2 / usual, **vars(c))]
        action = max((event.action for event in events), key=_ORDER.index, default="go")
        if not self._config.act:
            action = "go"
        if action == "skip" and self._skips + 1 >= self._config.rollback_after:
            action = "rollback"
        if action == "rollback" and self._rollbacks >= self._config.halt_after:
            action = "halt"
        return GuardVerdict(action, tuple(events))

    def settle(self, version: int, verdict: GuardVerdict) -> dict[str, float]:
        """What the manifest of the version after `version` says of the step, for `history`."""
        stopped = any(event.level == "stop" for event in verdict.events)
        return {
            "guard/warned": float(sum(event.level == "warn" for event in verdict.events)),
            "guard/stopped": float(sum(event.level == "stop" for event in verdict.events)),
            "guard/action": float(_ORDER.index(verdict.action)),
            "guard/good": float(self.good if stopped else version),
        }

    def record(self, metrics: Mapping[str, float]) -> None:
        """Takes in the metrics of a version that was just published, `settle`'s among them."""
        self._remember(metrics)

    def _remember(self, metrics: Mapping[str, float]) -> None:
        if "guard/action" not in metrics:
            return
        action = _ORDER[int(metrics["guard/action"])]
        self.good = int(metrics["guard/good"])
        self._skips = self._skips + 1 if action == "skip" else 0
        self._rollbacks = 0 if action == "go" else self._rollbacks + (action == "rollback")
        if action == "go" and math.isfinite(norm := metrics.get("optim/grad_norm", math.nan)) and norm > 0:
            self._norms.append(norm)
        if len(self._first) < self._config.baseline and self._measured(metrics):
            self._first.append(metrics["mismatch/k2"])
        if len(self._canaries) < self._config.baseline and "canary/k2" in metrics:
            self._canaries.append(metrics["canary/k2"])

    def _measured(self, metrics: Mapping[str, float]) -> bool:
        return "mismatch/k2" in metrics and metrics.get("mismatch/tokens", 0.0) >= self._config.min_tokens

    def _values(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The guarded figures that this step has."""
        values: dict[str, float | None] = {
            "lag": metrics.get("off_policy/max"),
            "kv_lag": metrics.get("stale/kv_lag"),
            "empty": _share(metrics.get("drop/episodes/empty"), metrics.get("rollout/episodes")),
            "weight_cut": metrics.get("loss/W_cut"),
            "routes_missing": metrics.get("router/missing"),
            "routes_refused": metrics.get("router/refused"),
            "numerics": metrics.get("mismatch/max_abs") if self._exact else None,
            "zero_variance": _share(metrics.get("rollout/zero_variance"), metrics.get("rollout/groups")),
        }
        norm = metrics.get("optim/grad_norm")
        if norm is not None:
            values["non_finite"] = float(not math.isfinite(norm))
            if len(self._norms) >= 5:
                values["grad_norm"] = _share(norm, median(self._norms))
        if self._measured(metrics):
            values |= {
                "mismatch_k2": metrics["mismatch/k2"],
                "tail_ln2": metrics.get("mismatch/p_ln2"),
                "tail_dp": metrics.get("mismatch/p_dp"),
                "correlation": metrics.get("mismatch/corr"),
                "ess": metrics.get("loss/W_ess", metrics.get("mismatch/ess")),
            }
            if len(self._first) >= 5:
                values["mismatch_growth"] = metrics["mismatch/k2"] / max(median(self._first), _FLOOR)
        return {name: value for name, value in values.items() if value is not None}

    def _crossed(self, name: str, value: float, **details: object) -> list[Event]:
        """One event if a threshold is crossed: the harder one. `details` are for its sentence."""
        guard: Guard = getattr(self._config, name)
        stop = float(self._staleness) if name == "lag" and guard.stop is None else guard.stop
        # What an episode saw is no older than its admission, which its last token is at most the bound away from.
        warn = float(self._staleness) if name == "kv_lag" and guard.warn is None else guard.warn
        for level, threshold in (("stop", stop), ("warn", warn)):
            if threshold is not None and (value < threshold if name in _LOW else value > threshold):
                wanted: Action = "go" if level == "warn" or guard.action == "warn" else guard.action
                sentence = _SENTENCES[name].format(value=value, threshold=threshold, **details)
                return [Event(name, "stop" if level == "stop" else "warn", value, threshold, wanted, sentence)]
        return []


def _share(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None
