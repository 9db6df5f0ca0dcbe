"""`etude eval MODEL --suite retrieval`: a model answers questions about files, under one or both document masks."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from etude.config import EngineConfig
from etude.corpus import (
    RETRIEVAL_HELD_OUT,
    FunctionText,
    RetrievalOptions,
    RetrievalSample,
    fetch_source,
    folder_functions,
    package_functions,
    retrieval_samples,
)
from etude.errors import UserError
from etude.evals.retrieval import RetrievalResult, summary
from etude.evals.stats import paired_difference
from etude.renderers import document_text, renderer_for

if TYPE_CHECKING:
    from etude.inference.engine.requests import Request

MASKS = ("full", "own")
CACHE = Path("outputs/corpus")
_ANSWER = 64  # tokens; the longest answers have 72 characters
_SECONDS = 600.0  # for one answer, those before it in the queue included

Right = list[list[bool]]  # by question, by order


@dataclass(frozen=True)
class RetrievalScore:
    """The result of one model under one mask."""

    model: Path
    result: RetrievalResult
    right: Right

    @property
    def mask(self) -> str:
        """ "full" for a plain prompt, "own" if each document attends to itself only."""
        return self.result.documents


def evaluate_retrieval(
    models: Sequence[Path],
    inference: EngineConfig,
    *,
    masks: Sequence[str],
    repositories: Sequence[Path],
    samples: int,
    orders: int,
    seed: int,
    as_json: bool,
) -> None:
    """Print shares of exact answers with 95 % intervals, and paired differences. Raises UserError."""
    from etude.models import check_folder

    if samples < 1 or orders < 1:
        raise UserError(f"retrieval needs at least one sample and one order, not {samples} and {orders}")
    for model in models:
        check_folder(model)
    drawn = questions(repositories, samples, seed)
    scores = [score for model in models for score in measure(model, drawn, masks, orders, seed, inference)]
    # Compares the masks of a model, and the models under a mask.
    pairs = [(a, b) for a, b in combinations(scores, 2) if (a.model == b.model) != (a.mask == b.mask)]
    clusters = [number for number, sample in enumerate(drawn) for _ in sample.questions]
    differences = [paired_difference(a.right, b.right, clusters, seed) for a, b in pairs]
    for score in scores:
        print(_line(score))
    for (a, b), difference in zip(pairs, differences, strict=True):
        print(f"{_name(b)} minus {_name(a)}: {difference.percent}")
    if as_json:
        rows = [{"model": str(score.model), **msgspec.to_builtins(score.result)} for score in scores]
        paired = [
            {"first": _name(a), "second": _name(b), **msgspec.to_builtins(difference)}
            for (a, b), difference in zip(pairs, differences, strict=True)
        ]
        print(json.dumps({"suite": "retrieval", "seed": seed, "results": rows, "second_minus_first": paired}))


def questions(repositories: Sequence[Path], count: int, seed: int) -> list[RetrievalSample]:
    """`count` samples of the folders `repositories`, by default of libraries outside of all bundled models' training
    data. Raises UserError."""
    functions: list[FunctionText] = []
    for folder in repositories:
        if not folder.is_dir():
            raise UserError(f"{folder} is not a folder: give the folder of a Python repository")
        functions += folder_functions(folder)
    for requirement in () if repositories else RETRIEVAL_HELD_OUT:
        functions += package_functions(fetch_source(requirement, CACHE))
    try:
        return list(islice(retrieval_samples(functions, RetrievalOptions(), seed), count))
    except ValueError as e:
        raise UserError(f"the repositories give no questions ({e})") from None


def measure(
    model: Path,
    samples: Sequence[RetrievalSample],
    masks: Sequence[str],
    orders: int,
    seed: int,
    inference: EngineConfig = EngineConfig(),
) -> list[RetrievalScore]:
    """Greedy answers of a model in an engine of its own. Order 0 is that of the samples, the other orders are
    random."""
    from etude.inference.engine.loading import load_engine
    from etude.models.loading import load_tokenizer

    renderer, encoder = renderer_for(model, tools=False), cast(Any, load_tokenizer(model)).backend_tokenizer
    encoder.encode_special_tokens = True  # text that spells a special token is text
    engine = load_engine(model, inference.model_copy(update={"max_batch": 64, "documents_mb": 1024}))
    engine.start()
    try:
        scores = []
        for mask in masks:
            right: Right = [[] for sample in samples for _ in sample.questions]
            for order in range(orders):
                rng = random.Random(f"{seed}/{order}")
                arranged = [sample.reordered(rng) if order else sample for sample in samples]
                rows = []
                for sample in arranged:
                    documents = [
                        encoder.encode(document_text(title, text), add_special_tokens=False).ids
                        for title, text in sample.documents
                    ]
                    for question in sample.questions:
                        tail = renderer.prompt([{"role": "user", "content": question.text}])
                        rows.append(engine.submit(_request(documents, tail, mask, renderer.stop_ids)))
                answers = [q.answer for sample in arranged for q in sample.questions]
                for row, answer, exact in zip(rows, answers, right, strict=True):
                    ids = row.future.result(_SECONDS).ids
                    text = ids[:-1] if ids and ids[-1] in renderer.stop_ids else ids
                    exact.append(encoder.decode(text, skip_special_tokens=False) == answer)
            scores.append(RetrievalScore(model, summary(mask, samples, right, seed), right))
        return scores
    except ValueError as e:
        raise UserError(f"{model} cannot answer: {e}") from None
    finally:
        engine.close()


def _request(documents: list[list[int]], tail: list[int], mask: str, stop: tuple[int, ...]) -> Request:
    from etude.inference.engine.requests import Request

    if mask == "own":
        return Request(ids=tail, documents=tuple(documents), max_tokens=_ANSWER, temperature=0.0, stop=stop)
    plain = [token for document in documents for token in document]
    return Request(ids=[*plain, *tail], max_tokens=_ANSWER, temperature=0.0, stop=stop)


def _line(score: RetrievalScore) -> str:
    result = score.result
    kinds = ", ".join(f"{kind} {100 * rate.mean:.1f} %" for kind, rate in result.kinds.items())
    orders = f", {100 * result.spread:.1f} points between {len(result.orders)} orders" if len(result.orders) > 1 else ""
    return f"{_name(score)}: {result.exact.percent} of {result.questions} questions exact ({kinds}){orders}"


def _name(score: RetrievalScore) -> str:
    return f"{score.model}, {score.mask}"
