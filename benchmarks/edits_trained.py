"""The bundled apply model on held-out edits that fit it: what it says by itself, with drafts and without."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from etude.config import EngineConfig
from etude.edits import examples as tables
from etude.edits.edit import DoesNotFit, Edit
from etude.errors import UserError
from etude.evals.fast_apply import SUITE
from etude.inference.engine.engine import Engine
from etude.inference.engine.requests import Request
from etude.inference.server.apply import Applier
from etude.models.loading import load_model
from etude.renderers import renderer_for
from etude.renderers.base import load_tokenizer

MODEL = Path(__file__).parent.parent / "models" / "nano-apply"


@dataclass(frozen=True)
class Timed:
    """One answer: its tokens, and seconds until the first token and after it."""

    ids: list[int]
    prefill: float
    decode: float
    passes: int


def trained(count: int, add: Callable[..., None]) -> int:
    """Adds the rows `suite/...`; returns how many answers differ from those of plain decoding (float32)."""
    model = load_model(MODEL)
    requests, wanted, characters = _requests(count, model.config.max_position_embeddings)
    fast, plain = (
        Engine(model, EngineConfig(max_batch=1)),
        Engine(model, EngineConfig(max_batch=1, speculate=False)),
    )
    for engine in (fast, plain):
        timed(engine, requests[0])  # compiles the kernels, measures the costs
    pairs = [(timed(plain, msgspec.structs.replace(r, sources=())), timed(fast, r)) for r in requests]
    gains = [slow.decode / quick.decode for slow, quick in pairs if quick.decode > 0]
    whole = [(slow.prefill + slow.decode) / (quick.prefill + quick.decode) for slow, quick in pairs]
    exact = sum(quick.ids[: len(ids)] == ids for (_, quick), ids in zip(pairs, wanted, strict=True))
    different = sum(slow.ids != quick.ids for slow, quick in pairs)
    name = f"{len(pairs)} held-out edits that fit models/nano-apply, greedy, float32"
    add("suite/speedup-median", statistics.median(gains), f"plain decoding, decode alone, {name}")
    add("suite/speedup-p10", float(np.quantile(gains, 0.1)), "the tenth part that gains least")
    add("suite/slower", sum(gain < 1 for gain in gains) / len(gains), "share of edits that are slower than plain")
    add("suite/end-to-end-median", statistics.median(whole), "plain decoding, prefill included in both")
    tokens = sum(len(quick.ids) for _, quick in pairs) / sum(quick.passes for _, quick in pairs)
    add("suite/tokens-per-pass", tokens, "1 in plain decoding", "tokens")
    speeds = [n / (quick.prefill + quick.decode) for (_, quick), n in zip(pairs, characters, strict=True)]
    add("suite/characters", statistics.median(speeds), "characters of the new file per second, prefill included", "1/s")
    add("suite/exact", exact / len(pairs), "share of the answers that are the result, byte for byte", "share")
    add("suite/mismatches", different, "answers that differ from those of plain decoding", "answers")
    return different


def _requests(count: int, length: int) -> tuple[list[Request], list[list[int]], list[int]]:
    """What is asked, the ids of the right answers, and the characters of the new files."""
    applier = Applier(load_tokenizer(MODEL), renderer_for(MODEL))
    requests, wanted, characters = [], [], []
    for example in tables.load(SUITE):
        if len(requests) == count:
            break
        try:
            request, close = applier.request(Edit(example.file, example.sketch, example.instruction), length)
        except DoesNotFit:
            continue
        requests.append(request)
        wanted.append(applier.encode_answer(example.result + close))
        characters.append(len(example.result))
    if not requests:
        raise UserError(f"no edit of the suite fits {MODEL}")
    return requests, wanted, characters


def timed(engine: Engine, request: Request) -> Timed:
    """A whole answer, with the prompt computed anew."""
    engine.cache.clear()
    start = time.perf_counter()
    row = engine.submit(request)
    while row.fed < len(request.ids):
        engine.step()
    first, steps = time.perf_counter(), engine.counters.steps
    while not row.future.done():
        engine.step()
    end = time.perf_counter()
    return Timed(row.future.result().ids, first - start, end - first, max(1, engine.counters.steps - steps))
