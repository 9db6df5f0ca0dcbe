"""Drafts in rollouts: first turns of repair episodes as the bundled model samples them, with drafts and without.

An `edit` call repeats lines of the function in the prompt, so the engine drafts from the row's own text, without being
told. Groups of 8 share a prompt; temperature 1, float32, one thread; prefill included.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.edit_cases import MODULES, source
from etude.config import EngineConfig
from etude.corpus import dialect
from etude.corpus.episodes import break_function
from etude.corpus.filters import File, function_texts, keep_function
from etude.inference.engine.engine import Engine
from etude.inference.engine.requests import Request
from etude.models.loading import load_model
from etude.renderers import renderer_for

MODEL = Path(__file__).parent.parent / "models" / "nano"
GROUP = 8
TURN = 160  # sampled tokens at most


def rollouts(quick: bool, add: Callable[..., None]) -> int:
    """Adds the rows `rollouts/...`; returns how many turns sampled one at a time are not those of plain decoding.

    Rows that share passes may differ without any draft, since they end at other passes and sums round otherwise.
    """
    model = load_model(MODEL)
    fast, plain = (
        Engine(model, EngineConfig(max_batch=64)),
        Engine(model, EngineConfig(max_batch=64, speculate=False)),
    )
    alone, different, turns = 0, 0, 0
    for batch in (1, 8) if quick else (1, 4, 8, 16, 32, 64):
        prompts = _prompts(3 if quick else 10, batch)
        for engine in (fast, plain):
            _seconds(engine, prompts[0])  # compiles the kernels, measures the costs
        before = fast.counters.sampled_tokens, fast.counters.accepted_tokens
        gains = []
        for requests in prompts[1:]:
            slow, said = _seconds(plain, requests)
            quickly, again = _seconds(fast, requests)
            gains.append(slow / quickly)
            differ = sum(a != b for a, b in zip(said, again, strict=True))
            alone += differ if batch == 1 else 0
            different, turns = different + differ, turns + len(said)
        sampled, accepted = fast.counters.sampled_tokens - before[0], fast.counters.accepted_tokens - before[1]
        what = f"plain decoding, {batch} rows in groups of {GROUP}, median of {len(gains)} batches of prompts; "
        add(f"rollouts/b{batch}", statistics.median(gains), what + f"{accepted / sampled:.0%} of tokens were drafted")
    add("rollouts/mismatches", different, f"of {turns} sampled turns; those of one row alone: {alone}", "turns")
    return alone


def _prompts(batches: int, rows: int) -> list[list[Request]]:
    """Batches of requests, each of functions of its own."""
    rng = random.Random(rows)
    renderer = renderer_for(MODEL)
    broken = []
    for name in MODULES:
        for function in function_texts(File(name, f"{name}.py", source(name))):
            if keep_function(function) and function.lines <= 20 and (case := break_function(function, rng)):
                broken.append(case)
    rng.shuffle(broken)
    made = []
    for _ in range(batches):
        chosen = [broken.pop() for _ in range(max(1, rows // GROUP))]
        asked = [dialect.prompt(case.function.name, case.path, case.source) for case in chosen]
        ids = [renderer.prompt([{"role": "user", "content": text}]) for text in asked]
        made.append(
            [
                Request(ids=ids[i // GROUP], max_tokens=TURN, seed=rng.randrange(2**31), stop=renderer.stop_ids)
                for i in range(rows)
            ]
        )
    return made


def _seconds(engine: Engine, requests: list[Request]) -> tuple[float, list[list[int]]]:
    engine.cache.clear()
    start = time.perf_counter()
    rows = [engine.submit(request) for request in requests]
    while not all(row.future.done() for row in rows):
        engine.step()
    return time.perf_counter() - start, [row.future.result().ids for row in rows]
