"""On-policy distillation: a teacher judges the model's own samples, token by token.

The teacher reads more than the student (a hint, such as a user's correction) or has other weights (an earlier
checkpoint). Training lowers the reverse divergence from the teacher at the student's own tokens y ~ S(.|x):

    KL(S(.|x, y_<t) || T(.|x, o, y_<t)) = E[log S(y_t) - log T(y_t)]
    its gradient                        = E[(log S(y_t) - log T(y_t)) grad log S(y_t)]      since E[grad log S] = 0

so that   a_t = log T(y_t|x, o, y_<t) - log S(y_t|x, y_<t)   without gradient is the advantage of a token, and is added
to that of the reward. A token's effect on later states is left out (a discount of 0), as in Thinking Machines' "On-
policy distillation". OPCD (arXiv:2602.12275) has the same divergence with the teacher's context as o, SDPO
(arXiv:2603.12273) with the user's next message as o.

Without bounds, this term has made answers short and confused in published experiments, hence the guards:

    relevance  a hint counts if the mean of a_t differs from those under hints of other episodes more than 95 % of
               these differ from each other
    clip       of every a_t
    baseline   minus the mean of the a_t of other rows. That mean is below 0, since E[a_t] = -KL: without a baseline
               every sampled token becomes less likely, and answers end early. It depends on no token of the row, so the
               expected gradient stays.
    cap        of the sum of |a_t| over a segment: long answers gain nothing by their length
    share      of the episodes of a batch that are judged at all

Suffixes: N tokens of the judged rows, E judged rows, K shuffled hints of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from etude.config import OnPolicyDistillConfig
from etude.records import Hint
from etude.trainer.rl.batch import Batch, Completion, PromptRow
from etude.trainer.rl.plan import TokenRows

SHUFFLES = 4  # number of other episodes' hints that a row is scored with
PERCENTILE = 0.95
LEAST_PAIRS = 20  # pairs of a row and another's hint; with fewer, the 95th percentile is unknown

Scorer = Callable[[TokenRows], Tensor]
"""Log-probabilities of the sampled tokens of rows, [N]."""


@dataclass(frozen=True)
class JudgedRow:
    """A row that the teacher may judge: its place in the batch, and its prompt."""

    row: int
    number: int  # index of the completion in its row
    prompt_P: np.ndarray
    completion: Completion
    documents: tuple[int, ...]

    @property
    def sampled(self) -> int:
        """Its sampled tokens."""
        return int(self.completion.mask_C.sum())


def judged_by_teacher(
    batch: Batch, config: OnPolicyDistillConfig, student: Scorer, teacher: Scorer, longest: int | None = None
) -> tuple[Batch, dict[str, float]]:
    """The batch with the teacher's bounded, weighted log-ratios added to the advantages of its tokens, and their
    figures. A row longer than `longest` tokens with its hint is not judged."""
    judged, left_out = _chosen(batch, config, longest)
    figures = {"distill/rows": float(len(judged)), "distill/left_out": float(left_out)}
    if not judged:
        return batch, figures
    student_N = student(_rows(judged, [None] * len(judged)))
    ratios = _split(teacher(_rows(judged, [j.completion.hint for j in judged])) - student_N, judged)
    hinted = [i for i, j in enumerate(judged) if j.completion.hint is not None]
    keep = set(range(len(judged)))
    if hinted:
        own_E = np.array([ratios[i].mean() for i in hinted])
        others_EK = _shuffled([judged[i] for i in hinted], student_N, judged, teacher, longest)
        passed_E = relevant(own_E, others_EK)
        keep -= {i for i, passed in zip(hinted, passed_E, strict=True) if not passed}
        figures |= {"distill/hints": float(len(hinted)), "distill/relevant": float(passed_E.sum())}
    bounded = bound({i: ratios[i] for i in sorted(keep)}, config.clip, config.cap)
    if bounded:
        all_N, taken_N = np.concatenate([ratios[i] for i in bounded]), np.concatenate(list(bounded.values()))
        generated = [len(c.mask_C.nonzero()[0]) for row in batch.rows for c in row.completions]
        figures |= {
            "distill/log_ratio": float(all_N.mean()),
            "distill/clipped": float((np.abs(all_N) > config.clip).mean()),
            "distill/advantage": float(np.abs(taken_N).mean()),
            "distill/tokens": float(len(all_N)),
            # Other than 1, if judged rows are longer or shorter than generated ones; lengths will follow them.
            "distill/length_ratio": len(all_N) / len(bounded) / float(np.mean(generated)),
        }
    return _with_advantages(batch, {(judged[i].row, judged[i].number): a for i, a in bounded.items()}, config), figures


def bound(ratios: Mapping[int, np.ndarray], clip: float, cap: float) -> dict[int, np.ndarray]:
    """The log-ratios of segments, each within `clip` of 0, minus the mean of the other segments' ratios; a whole
    segment is scaled down if its absolute sum exceeds `cap`."""
    clipped = {i: np.clip(ratio_N, -clip, clip) for i, ratio_N in ratios.items()}
    total, tokens = (sum(f(c) for c in clipped.values()) for f in (np.sum, len))
    bounded: dict[int, np.ndarray] = {}
    for i, clipped_N in clipped.items():
        others = tokens - len(clipped_N)
        centred_N = clipped_N - (total - clipped_N.sum()) / others if others else clipped_N
        absolute = np.abs(centred_N).sum()
        bounded[i] = centred_N if absolute <= cap else centred_N * (cap / absolute)
    return bounded


def relevant(own_E: np.ndarray, others_EK: np.ndarray) -> np.ndarray:
    """bool [E]: whether a row's mean log-ratio differs from the mean under others' hints by more than these differ from
    each other, at the 95th percentile. Any note makes an answer that was sampled without it less likely, for some
    answers more than for others; subtracting the row's mean removes that. With fewer than 20 pairs, none is
    relevant."""
    shuffles = others_EK.shape[1]
    if others_EK.size < LEAST_PAIRS or shuffles < 2:
        return np.zeros(len(own_E), bool)
    mean_E1 = others_EK.mean(axis=1, keepdims=True)
    apart_EK = np.abs(others_EK - mean_E1) * shuffles / (shuffles - 1)  # from the mean of the other pairs
    return np.abs(own_E - mean_E1[:, 0]) > np.quantile(apart_EK, PERCENTILE, method="higher")


def _chosen(batch: Batch, config: OnPolicyDistillConfig, longest: int | None) -> tuple[list[JudgedRow], int]:
    """The rows of as many episodes as the share allows, in the order of the batch, and the number of too long ones."""
    most = int(config.share * len(batch.flat) + 1e-9)
    judged: list[JudgedRow] = []
    episodes: set[int] = set()
    left_out = 0
    for r, row in enumerate(batch.rows):
        for number, c in enumerate(row.completions):
            if c.hint is None and config.teacher == "self":
                continue
            if c.episode not in episodes and len(episodes) == most:
                continue
            extra = 0 if c.hint is None else len(c.hint.ids) // 4
            if longest is not None and len(row.prompt_P) + len(c.ids_C) + extra > longest:
                left_out += 1
                continue
            episodes.add(c.episode)
            judged.append(JudgedRow(r, number, row.prompt_P, c, row.documents))
    return judged, left_out


def _rows(judged: Sequence[JudgedRow], hints: Sequence[Hint | None]) -> TokenRows:
    """The rows as a teacher with these hints reads them."""
    rows: list[np.ndarray] = []
    sampled: list[np.ndarray] = []
    for j, hint in zip(judged, hints, strict=True):
        prompt_P, c = j.prompt_P, j.completion
        if hint is not None:
            at = min(hint.at, len(prompt_P))
            prompt_P = np.concatenate([prompt_P[:at], np.frombuffer(hint.ids, "<i4"), prompt_P[at:]])
        rows.append(np.concatenate([prompt_P, c.ids_C]))
        sampled.append(len(prompt_P) + np.flatnonzero(c.mask_C))
    documents = tuple(j.documents for j in judged)
    return TokenRows(tuple(rows), tuple(sampled), None, documents if any(documents) else None)


def _split(values_N: Tensor, judged: Sequence[JudgedRow]) -> list[np.ndarray]:
    """The values as one array per row, float64."""
    return np.split(values_N.double().cpu().numpy(), np.cumsum([j.sampled for j in judged])[:-1])


def _shuffled(
    hinted: Sequence[JudgedRow], student_N: Tensor, judged: Sequence[JudgedRow], teacher: Scorer, longest: int | None
) -> np.ndarray:
    """Mean log-ratios of each hinted row under the hints of K others, [E, K]. The others are far away in the batch,
    since neighbours may belong to one conversation. A hint is cut if the row would become too long."""
    kept = {(j.row, j.number): own for j, own in zip(judged, _split(student_N, judged), strict=True)}
    students = [kept[j.row, j.number] for j in hinted]
    columns: list[list[float]] = []
    count = min(SHUFFLES, len(hinted) - 1)
    for shift in (len(hinted) * (k + 1) // (count + 1) for k in range(count)):
        others = [_placed(j, hinted[(i + shift) % len(hinted)], longest) for i, j in enumerate(hinted)]
        scored = _split(teacher(_rows(hinted, others)), hinted)
        columns.append([float((t - s).mean()) for t, s in zip(scored, students, strict=True)])
    return np.array(columns).T if columns else np.zeros((len(hinted), 0))


def _placed(row: JudgedRow, other: JudgedRow, longest: int | None) -> Hint:
    """The hint of another row at the place of this row's own."""
    assert row.completion.hint is not None
    assert other.completion.hint is not None
    ids = other.completion.hint.ids
    if longest is not None:
        ids = ids[: 4 * (longest - len(row.prompt_P) - len(row.completion.ids_C))]
    return Hint(ids=ids, at=row.completion.hint.at)


def _with_advantages(
    batch: Batch, log_ratios: dict[tuple[int, int], np.ndarray], config: OnPolicyDistillConfig
) -> Batch:
    rows: list[PromptRow] = []
    for r, row in enumerate(batch.rows):
        completions: list[Completion] = []
        for number, c in enumerate(row.completions):
            if (ratio_N := log_ratios.get((r, number))) is not None:
                advantages_C = c.advantages_C.copy()
                advantages_C[c.mask_C == 1] += (config.weight * c.weight * ratio_N).astype(np.float32)
                c = replace(c, advantages_C=advantages_C)
            completions.append(c)
        rows.append(replace(row, completions=tuple(completions)))
    return replace(batch, rows=tuple(rows))
