"""Documents of 200 tokens and a tail of 64 in the engine, one thread, float32, against its own full prefill.

ttft/N            seconds to the first token of the same tokens as a plain prompt, nothing cached / of N documents that
                  are in the document cache, in a new order, before a new tail; medians of runs in turns
tail/N            seconds to that first token / of the tail alone, as a prompt of its own: 1 would be free documents
assembly/N        share of the seconds to the first token that goes into rotating and copying documents
cold/N            the first request, documents not yet computed: full prefill / it
reorder/hit-rate  document tokens that a new order of 10 found computed, over all; and, for comparison, what the prefix
                  cache keeps of the same prompts sent plain
logits/max-abs    largest difference from one masked forward pass (`models/segments.py`), every token of the tail

quality/full      share of exact answers to questions of cross-file retrieval (`etude eval --suite retrieval`) that a
                  model trained on documents gives to plain prompts
quality/trained   the same model, each document seeing itself only
quality/untrained a model trained under the full mask only, each document seeing itself only

The model has the sizes of the bundled one, a longer context and random weights: speed does not depend on them.
Quality does: its rows need folders of trained models, named by ETUDE_DOCUMENTS_MODEL and ETUDE_DOCUMENTS_CONTROL, and
are `absent` with a reason without them.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from benchmarks.table import Table
from benchmarks.threads import one_thread
from etude.config import EngineConfig
from etude.corpus.retrieval import RetrievalSample
from etude.evals.document_suite import measure, questions
from etude.inference.engine.cache import NO_MATCH
from etude.inference.engine.engine import Engine
from etude.inference.engine.forward import logits_of
from etude.inference.engine.requests import Request, RunningSequence
from etude.models import attention, experts
from etude.models.attention import SegmentLayout
from etude.models.kernels import BLOCK
from etude.models.segments import Graph, Node
from etude.records import Generation

MODEL = Path(__file__).parent.parent / "models" / "nano"
CONTEXT, LENGTH, TAIL = 8192, 200, 64
TARGETS = {10: 15.0, 20: 20.0, 30: 25.0}
LIMIT = 5e-5  # of logits, in float32
QUALITY = (
    (("quality/full", "quality/trained"), ("full", "own"), "ETUDE_DOCUMENTS_MODEL"),
    (("quality/untrained",), ("own",), "ETUDE_DOCUMENTS_CONTROL"),
)


def run(quick: bool) -> dict[str, Any]:
    """Rows and checks; a minute or two on an idle core. `quick`: one full prefill each instead of three."""
    with one_thread():
        return _run(*((1, 3, 2, 25) if quick else (3, 9, 10, 150)))


def _run(fulls: int, repeats: int, orders: int, samples: int) -> dict[str, Any]:
    model = _model()
    engine = Engine(model, EngineConfig(speculate=False))
    rng = np.random.default_rng(0)
    _first(engine, Request(ids=_ids(rng, 40), documents=(_ids(rng, 40),), max_tokens=1))  # compiles the kernels
    table = Table("documents")
    add, checks = table.add, table.checks
    for count, target in TARGETS.items():
        full, warm, tail, cold, assembly = times(engine, rng, count, fulls, repeats)
        tokens = count * LENGTH + TAIL
        what = f"plain prompt of the same {tokens} tokens, full prefill, {full:.3f} s"
        add(f"ttft/{count}", full / warm, "x", what)
        add(f"tail/{count}", warm / tail, "x", f"a plain prompt of {TAIL} tokens, {tail * 1e3:.1f} ms")
        add(f"assembly/{count}", assembly / warm, "x", f"time to the first token, {warm * 1e3:.1f} ms")
        add(f"cold/{count}", full / cold, "x", what)
        checks[f"ttft/{count} at least {target:.0f}x"] = full / warm >= target
    documents = [_ids(rng, LENGTH) for _ in range(10)]
    ours, prefix = (_hit_rate(engine, orders, documents, plain) for plain in (False, True))
    add("reorder/hit-rate", ours, "x", f"all document tokens, {orders} random orders of 10")
    add("reorder/hit-rate-prefix", prefix, "x", "the same, sent as plain prompts to the prefix cache")
    difference, same = difference_from_one_pass(model, engine, rng, documents)
    add("logits/max-abs", difference, "logit", "one masked forward pass, 10 documents, float32")
    checks["logits are those of one masked pass"] = difference <= LIMIT
    checks["the first token is that of one masked pass"] = same
    checks["a new order computes no document again"] = ours == 1.0
    absent = _quality(add, checks, samples)
    return table.result() | {"absent": absent}


def _quality(add: Callable[[str, float, str, str], None], checks: dict[str, bool], samples: int) -> dict[str, str]:
    """Adds the rows of the trained models that there are; the others, and why they are not."""
    absent: dict[str, str] = {}
    shared: list[RetrievalSample] = []
    full = None
    for cases, masks, variable in QUALITY:
        folder = os.environ.get(variable)
        if not folder:
            absent |= dict.fromkeys(cases, f"{variable} names no model folder; docs/documents.md says how to train one")
            continue
        shared = shared or questions((), samples, 0)
        for case, one in zip(cases, measure(Path(folder), shared, masks, 1, 0), strict=True):
            share = one.result.exact
            what = f"{one.result.questions} questions, 95 %: {share.low:.3f} to {share.high:.3f}"
            add(case, share.mean, "share", what)
            full = share.mean if case == "quality/full" else full
            if case == "quality/trained" and full is not None:
                checks["trained answers are 97 % of those with all documents visible"] = share.mean >= 0.97 * full
    return absent


def _model() -> PreTrainedModel:
    config = AutoConfig.from_pretrained(MODEL)
    config.max_position_embeddings = CONTEXT
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.set_attn_implementation(attention.NAME)
    model.set_experts_implementation(experts.NAME)
    return model.eval()


def _ids(rng: np.random.Generator, count: int) -> list[int]:
    return rng.integers(32, 4096, count).tolist()


def _first(engine: Engine, request: Request) -> tuple[float, Generation]:
    """Seconds until the first token of a request alone in the engine; the prefix cache forgets the ones before."""
    engine.cache.clear()
    start = time.perf_counter()
    row = engine.submit(request)
    while not row.future.done():
        engine.step()
    return time.perf_counter() - start, row.future.result()


def times(
    engine: Engine, rng: np.random.Generator, count: int, fulls: int, repeats: int
) -> tuple[float, float, float, float, float]:
    """Median seconds of a full prefill, with cached documents, of a tail alone, with new documents, of assembly."""
    documents = [_ids(rng, LENGTH) for _ in range(count)]
    counters = engine.documents.counters
    cold, generation = _first(engine, Request(ids=_ids(rng, TAIL), documents=tuple(documents), max_tokens=1))
    assert generation.cached_document_tokens == 0
    full, warm, tail, assembly = [], [], [], []
    for i in range(max(fulls, repeats)):
        if i < fulls:
            plain = [token for document in documents for token in document] + _ids(rng, TAIL)
            full.append(_first(engine, Request(ids=plain, max_tokens=1))[0])
        if i < repeats:
            order, before = tuple(documents[j] for j in rng.permutation(count)), counters.assembly_seconds
            seconds, generation = _first(engine, Request(ids=_ids(rng, TAIL), documents=order, max_tokens=1))
            assert generation.cached_tokens == count * LENGTH
            warm.append(seconds)
            assembly.append(counters.assembly_seconds - before)
            tail.append(_first(engine, Request(ids=_ids(rng, TAIL), max_tokens=1))[0])
    return statistics.median(full), statistics.median(warm), statistics.median(tail), cold, statistics.median(assembly)


def _hit_rate(engine: Engine, count: int, documents: Sequence[list[int]], plain: bool) -> float:
    """Share of document tokens not computed, over random orders that follow a first one; the prefix cache stays."""
    engine.cache.clear()
    rng, reused = np.random.default_rng(1), 0
    orders = [np.arange(len(documents)), *(rng.permutation(len(documents)) for _ in range(count))]
    for number, order in enumerate(orders):
        chosen, tail = [documents[i] for i in order], _ids(rng, TAIL)
        flat = [token for document in chosen for token in document]
        request = Request(ids=flat + tail, max_tokens=1)
        if not plain:
            request = Request(ids=tail, documents=tuple(chosen), max_tokens=1)
        row = engine.submit(request)
        while not row.future.done():
            engine.step()
        generation = row.future.result()
        if number:
            reused += min(generation.cached_tokens, len(flat)) if plain else generation.cached_document_tokens
    return reused / (count * len(documents) * LENGTH)


@torch.inference_mode()
def difference_from_one_pass(
    model: PreTrainedModel, engine: Engine, rng: np.random.Generator, documents: Sequence[list[int]]
) -> tuple[float, bool]:
    """Largest difference of the tail's logits from a masked pass, and whether the greedy first tokens are equal."""
    order, tail = [documents[i] for i in rng.permutation(len(documents))], _ids(rng, TAIL)
    _, generation = _first(engine, Request(ids=tail, documents=tuple(order), max_tokens=1, temperature=0.0))
    starts = [LENGTH * i for i in range(len(order) + 1)]
    nodes = [Node(np.array(ids), start) for ids, start in zip(order, starts, strict=False)]
    graph = Graph((*nodes, Node(np.array(tail), starts[-1], tuple(range(len(order))))))
    ids, positions = (torch.from_numpy(x)[None] for x in (graph.ids_T, graph.positions_T))
    out = model(input_ids=ids, position_ids=positions, layout=SegmentLayout(graph), use_cache=False)
    masked_TV = out.logits[0, -TAIL:]
    difference = (_tail_logits(model, engine, order, tail) - masked_TV).abs().max()
    return float(difference), generation.ids == [int(masked_TV[-1].argmax())]


def _tail_logits(model: PreTrainedModel, engine: Engine, order: Sequence[list[int]], tail: list[int]) -> torch.Tensor:
    """Logits [TAIL, V] as the engine computes them for cached documents; it samples from the last only."""
    row = RunningSequence(Request(ids=tail, documents=tuple(order), max_tokens=1), Future(), None)
    length = len(row.request.prompt)
    assert engine.documents.gather(row, 0, engine.version)
    row.pages = engine.cache.take(NO_MATCH, -(-length // BLOCK), None)
    engine.documents.assemble(row, 0)
    table = np.array([row.pages], dtype=np.int32)
    every_N = np.arange(TAIL)
    logits = logits_of(
        model, engine.cache, table, np.array(tail), np.zeros(TAIL, np.int64), length - TAIL + every_N, every_N
    )
    engine.cache.discard([], row.pages)
    return logits
