"""What answers to questions of cross-file retrieval add up to: exact matches, by kind and by order of the documents."""

from __future__ import annotations

from collections.abc import Sequence

from etude.corpus.retrieval import RetrievalQuestion, RetrievalSample
from etude.evals.stats import Estimate, pass_rate
from etude.records import Record


class RetrievalResult(Record):
    """One model under one mask. Rates are over all orders, with intervals at 95 % clustered by sample."""

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
    """`right` holds, for the questions of all samples one after the other, whether each order's answer was exact."""
    asked: list[tuple[int, RetrievalQuestion]] = [(i, q) for i, sample in enumerate(samples) for q in sample.questions]
    if len(asked) != len(right):
        raise ValueError(f"{len(right)} answers for {len(asked)} questions")
    by_kind: dict[str, list[int]] = {}
    for number, (_, question) in enumerate(asked):
        by_kind.setdefault(question.kind, []).append(number)
    orders = tuple(sum(row) / len(row) for row in zip(*right, strict=True))

    def rate(numbers: Sequence[int]) -> Estimate:
        return pass_rate([right[n] for n in numbers], [asked[n][0] for n in numbers], seed)

    return RetrievalResult(
        documents=documents,
        samples=len(samples),
        questions=len(asked),
        exact=rate(range(len(asked))),
        kinds={kind: rate(numbers) for kind, numbers in sorted(by_kind.items())},
        counts={kind: len(numbers) for kind, numbers in sorted(by_kind.items())},
        orders=orders,
        spread=max(orders) - min(orders),
    )
