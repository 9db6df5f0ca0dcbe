"""The reward of a turn: its components from observations, their sum, and weights that make up for censored turns."""

from __future__ import annotations

from collections.abc import Mapping

import blake3
import msgspec
import numpy as np

from etude.config.live import LabelsConfig

_FORM = "3"  # version of the rules in rewards, timeline, fates, attribution and content; changes with any of them

WEIGHTS = {
    "kept": 0.6,  # characters alive, up to `labels.characters` of them
    "lost": -0.4,  # share of the characters that did not survive
    "undone": -0.2,
    "choice": 0.2,  # 1 - threshold for an accepted edit, -threshold for a rejected one, 0 for silence
    "invalid_call": -0.6,
    "question": -1.0,  # times `labels.question_cost`
    "no_edit": -1.0,  # times `labels.no_edit_cost`
    "followup": -0.3,
    "retry": -0.3,
    "stopped": -0.2,
    "tests": 0.2,
    "lint": -0.1,  # of ten new findings
    "rating": 0.2,
    "latency": -0.05,  # of a minute or more
    "session": 0.2,
}
"""The value of each component at its full size; the sum is cut at -1 and 1."""


def rules_version(config: LabelsConfig) -> str:
    """The version of the labels' rules and settings."""
    settings = msgspec.json.encode([config.model_dump(mode="json"), WEIGHTS], order="sorted")
    return f"{_FORM}-{blake3.blake3(settings).hexdigest()[:12]}"


def components(observed: Mapping[str, np.ndarray], config: LabelsConfig) -> dict[str, np.ndarray]:
    """The components of the rewards of N turns, float64 [N] each; NaN where nothing was observed. `observed`
    holds float columns [N], NaN where not observed, any of: share (of the characters alive when the window closed),
    characters, undone, choice (1 accepted, -1 rejected, 0 silent), invalid_call (1: any), question (1: asked),
    repaid (1: it was answered, and the edit of the next turn survived), no_edit, followup (probability of
    dissatisfaction), retry, stopped, tests, lint (new findings), rating, latency (seconds), session. Raises ValueError
    for other names."""
    if unknown := set(observed) - set(WEIGHTS) - {"share", "characters", "repaid"}:
        raise ValueError(f"no component is made of {sorted(unknown)}")
    out: dict[str, np.ndarray] = {}
    if "share" in observed:
        alive_N = np.clip(observed["share"], 0.0, 1.0)
        out["kept"] = WEIGHTS["kept"] * np.minimum(1.0, alive_N * observed["characters"] / config.characters)
        out["lost"] = WEIGHTS["lost"] * (1.0 - alive_N)
    for name, column_N in observed.items():
        if name in ("share", "characters", "repaid"):
            continue
        if name == "choice":
            part_N = np.where(column_N > 0, 1.0 - config.threshold, np.where(column_N < 0, -config.threshold, 0.0))
            part_N = np.where(np.isnan(column_N), np.nan, part_N)
        elif name == "question":
            repaid_N = np.nan_to_num(observed.get("repaid", np.zeros_like(column_N)))
            part_N = config.question_cost * column_N * (1.0 - repaid_N)
        elif name == "no_edit":
            part_N = config.no_edit_cost * column_N
        elif name in ("tests", "rating", "session"):
            part_N = np.clip(column_N, -1.0, 1.0)
        elif name == "lint":
            part_N = np.clip(column_N / 10.0, -1.0, 1.0)
        elif name == "latency":
            part_N = np.clip(column_N / 60.0, 0.0, 1.0)
        else:
            part_N = np.clip(column_N, 0.0, 1.0)
        out[name] = WEIGHTS[name] * part_N
    return out


def rewards(parts: Mapping[str, np.ndarray]) -> np.ndarray:
    """The sum of components, float64 [N], cut at -1 and 1; an unobserved component adds nothing."""
    total = np.zeros(len(next(iter(parts.values()))) if parts else 0)
    for name in sorted(parts):
        total += np.nan_to_num(parts[name])
    return np.clip(total, -1.0, 1.0)


def censoring_weights(seconds_N: np.ndarray, known_N: np.ndarray, cell_N: np.ndarray, most: float) -> np.ndarray:
    """1/G(t-) of the known turns, at most `most`, and 0 of the censored turns, float64 [N]. G is the Kaplan-Meier
    estimate of the probability, within a cell (int [N]), that a turn is not censored before t; an outcome comes before
    a censoring at the same time. Unless `most` cuts, the weights of a cell add up to its size if its last turn is
    known: the weight of a censored turn is shared out among turns that were observed for longer (Efron 1967; weights
    of Robins and Rotnitzky 1992)."""
    order = np.lexsort((~known_N, seconds_N, cell_N))  # outcomes before censorings at the same time
    out = np.zeros(len(order))
    for mine in np.split(order, np.flatnonzero(np.diff(cell_N[order])) + 1):
        at_risk = np.arange(len(mine), 0.0, -1.0)  # one after the other: ties of censorings multiply to the same
        stays = np.where(known_N[mine], 1.0, 1.0 - 1.0 / at_risk)
        before = np.cumprod(np.r_[1.0, stays])[:-1]
        out[mine] = np.where(known_N[mine], np.minimum(1.0 / before, most), 0.0)
    return out
