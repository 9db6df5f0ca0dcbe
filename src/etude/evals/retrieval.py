"""Results of cross-file retrieval: the share of exact answers, by kind of question and by order of the documents."""

from __future__ import annotations

from collections.abc import Sequence

from etude.corpus import RetrievalSample
from etude.evals.stats import Estimate, pass_rate
from etude.records import Record


class RetrievalResult(Record, frozen=True):
    """The result of one model under one mask. Rates are over all orders, with intervals at 95 % clustered by sample."""

    documents: str  # "full": a plain prompt; "own": each document sees itself only
    samples: int
    questions: int
    exact: Estimate
    kinds: dict[str, Estimate]
    counts: dict[str, int]  # questions of each kind
    orders: tuple[float, ...]  # share of exact answers in each order of the documents
    spread: float  # between the best and the worst order


def summary(
    documents: str, samples: Sequence[RetrievalSample], right: Sequence[Sequence[bool]], seed: int
) -> RetrievalResult:
    """The result of one mask. `right[q][o]` is whether the answer to question q, counted over all samples, was exact in
    order o. Raises ValueError if the lengths differ."""
    questions = [(i, q) for i, sample in enumerate(samples) for q in sample.questions]
    if len(questions) != len(right):
        raise ValueError(f"{len(right)} answers for {len(questions)} questions")
    by_kind: dict[str, list[int]] = {}
    for number, (_, question) in enumerate(questions):
        by_kind.setdefault(question.kind, []).append(number)
    orders = tuple(sum(row) / len(row) for row in zip(*right, strict=True))

    def rate(numbers: Sequence[int]) -> Estimate:
        return pass_rate([right[n] for n in numbers], [questions[n][0] for n in numbers], seed)

    return RetrievalResult(
        documents=documents,
        samples=len(samples),
        questions=len(questions),
        exact=rate(range(len(questions))),
        kinds={kind: rate(numbers) for kind, numbers in sorted(by_kind.items())},
        counts={kind: len(numbers) for kind, numbers in sorted(by_kind.items())},
        orders=orders,
        spread=max(orders) - min(orders),
    )
