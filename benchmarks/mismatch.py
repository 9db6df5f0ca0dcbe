"""Trainer against engine on a mixture of experts: what router replay saves, and the price of equal bits. One thread.

replay/k3-gain              k3 of the trainer without replay, over that with it; bfloat16 on both sides
replay/flips                share of recorded experts that did not run, with replay
replay/flips-without        tokens for which the trainer's own routers choose other experts in some layer
replay/cost, record/cost    seconds of forward and backward with replay over without; of sampling, likewise
deterministic/max-abs-dlogp largest difference of a log-probability between engine and trainer, float32
deterministic/cost          seconds of the engine in deterministic mode, over those of its default mode; same batch
deterministic/cost-trainer  seconds of forward and backward of separate rows, exact over plain

Two models: the bundled one, and a random one with experts in each of many layers (`deep`), in which flips matter more.
The engine batches groups of 8 that share a prompt, so rows come from prefix hits and passes of many sizes. Seconds are
processor time. k3 = exp(d) - 1 - d, d = trainer - engine, with d cut to [-1, 1]: its plain mean is ruled by one token.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks.table import Table
from benchmarks.threads import one_thread
from etude.config import EngineConfig
from etude.inference.engine.engine import Engine
from etude.inference.engine.requests import Request
from etude.models import attention, experts
from etude.models.batch_invariant import batch_invariant
from etude.models.loading import load_model
from etude.models.router_replay import UNFED
from etude.records import Generation
from etude.trainer.rl.execution import BatchResult, evaluate
from etude.trainer.rl.execution import run as execute
from etude.trainer.rl.mismatch import Mismatch
from etude.trainer.rl.plan import ForwardPass, TokenRows, plan, shape_of

NANO = Path(__file__).parent.parent / "models" / "nano"
GROUP, PROMPT, BUDGET = 8, 150, 8192
TARGET = 3.0  # of the gain
Rows = Sequence[tuple[Request, Generation]]


def run(quick: bool) -> dict[str, Any]:
    """Rows and checks. `quick` samples a few thousand tokens instead of 100,000 and fewer of the deep model."""
    with one_thread():
        return _run(quick)


def _run(quick: bool) -> dict[str, Any]:
    table = Table("mismatch")
    add, checks = table.add, table.checks
    whole, repeats = True, 1 if quick else 3
    for name, model, groups, tokens in (
        ("", load_model(NANO, dtype=torch.bfloat16), 8 if quick else 64, 60 if quick else 100),
        ("deep-", _deep(), 2 if quick else 16, 30 if quick else 100),
    ):
        figures = _replay(model, groups, tokens, repeats)
        add(f"replay/{name}k3-gain", figures["off"] / figures["on"], "x", "k3 of the same tokens without replay")
        add(f"replay/{name}k3", figures["on"], "nats", f"{figures['off']:.2g} without replay")
        # Not run are those of tokens without a record, and those that are implausible.
        flips = figures["missing"] + figures["refused"]
        add(f"replay/{name}flips", flips, "share of experts", "the engine's experts, bfloat16 on both sides")
        add(f"replay/{name}flips-without", figures["flips"], "share of tokens", "the same, the trainer's own experts")
        whole &= flips == 0
        if not name:
            add("replay/cost", figures["cost"], "x", "forward and backward without replay")
            add(
                "record/cost",
                _recording(model, 2 if quick else 8, tokens, repeats),
                "x",
                "sampling the same without recording",
            )
            checks["replay: k3 falls to a third at least"] = figures["off"] >= TARGET * figures["on"]
    checks["replay: every token ran the experts that the engine recorded"] = whole
    largest, count, cost, trainer = _deterministic(load_model(NANO), 8 if quick else 128, 40 if quick else 100, repeats)
    add("deterministic/max-abs-dlogp", largest, "nats", f"engine, {count} sampled tokens, float32")
    add("deterministic/cost", cost, "x", "seconds of the engine's default mode, same batch")
    add("deterministic/cost-trainer", trainer, "x", "seconds of separate rows, not exact")
    checks["deterministic: trainer and engine agree in every bit"] = largest == 0.0
    return table.result()


def _deep() -> PreTrainedModel:
    """Sixteen MoE layers of 32 experts, 4 per token, bfloat16."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=1024, hidden_size=128, intermediate_size=128, moe_intermediate_size=64, num_hidden_layers=16,
        num_attention_heads=2, num_key_value_heads=1, head_dim=64, num_experts=32, num_experts_per_tok=4,
        norm_topk_prob=True, tie_word_embeddings=True, initializer_range=0.05,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).to(torch.bfloat16).eval()
    model.set_attn_implementation(attention.NAME)
    model.set_experts_implementation(experts.NAME)
    return model


def _sample(engine: Engine, groups: int, tokens: int, *, seed: int = 0, routes: bool = False) -> Rows:
    rng = np.random.default_rng(seed)
    prompts = rng.integers(32, engine.vocab_size, (groups, PROMPT)).tolist()
    requests = [
        Request(ids=ids, max_tokens=tokens, seed=GROUP * g + m, routes_from=0 if routes else None)
        for g, ids in enumerate(prompts)
        for m in range(GROUP)
    ]
    rows = [engine.submit(request) for request in requests]
    while not all(row.future.done() for row in rows):
        engine.step()
    return [(request, row.future.result()) for request, row in zip(requests, rows, strict=True)]


def _token_rows(sampled: Rows) -> TokenRows:
    ids = tuple(np.array(request.ids + generation.ids) for request, generation in sampled)
    recorded = [generation.routes for _, generation in sampled if generation.routes is not None]
    routes = tuple(np.pad(r.array(), ((0, 1), (0, 0), (0, 0)), constant_values=UNFED) for r in recorded)
    return TokenRows(ids, tuple(np.arange(PROMPT, len(row)) for row in ids), routes or None)


def _replay(model: PreTrainedModel, groups: int, tokens: int, repeats: int) -> dict[str, float]:
    """k3 with and without replay, flips, and what replay costs; the trainer shares prompts, as it does in a run."""
    sampled = _sample(Engine(model, EngineConfig(max_batch=64), routes=True), groups, tokens, routes=True)
    rows = _token_rows(sampled)
    parts = plan(rows, "auto", BUDGET, shape_of(model)).parts
    outcomes = {"on": evaluate(model, parts, rows.count), "off": evaluate(model, parts, rows.count, replays=False)}
    replayed = outcomes["on"].replayed.metrics()
    figures = {name: _k3(outcome, sampled) for name, outcome in outcomes.items()}
    figures |= {name: replayed[f"router/{name}"] for name in ("refused", "missing")}
    some = _token_rows(sampled[: 2 * GROUP])
    with_, without = (
        plan(t, "packed", BUDGET, shape_of(model)).parts for t in (some, TokenRows(some.rows, some.sampled))
    )
    cost = _ratio(lambda: _train(model, with_, some.count), lambda: _train(model, without, some.count), repeats)
    return figures | {"flips": replayed["router/flip_token"], "cost": cost}


def _k3(outcome: BatchResult, sampled: Rows) -> float:
    mismatch = Mismatch()
    mismatch.add(outcome.logprobs_N, _recorded(sampled))
    return mismatch.metrics("m")["m/k3_clip"]


def _recorded(sampled: Rows) -> torch.Tensor:
    return torch.tensor(np.concatenate([generation.logprobs for _, generation in sampled]), dtype=torch.float32)


def _recording(model: PreTrainedModel, groups: int, tokens: int, repeats: int) -> float:
    """Seconds of sampling with recorded routes over without."""
    with_, without = (Engine(model, EngineConfig(max_batch=64), routes=on) for on in (True, False))
    return _ratio(lambda: _cold(with_, groups, tokens, routes=True), lambda: _cold(without, groups, tokens), repeats)


def _deterministic(model: PreTrainedModel, groups: int, tokens: int, repeats: int) -> tuple[float, int, float, float]:
    """Largest difference, tokens compared, and seconds in deterministic mode over those without: engine, trainer."""
    ours, theirs = (
        Engine(model, EngineConfig(max_batch=64, speculate=False), deterministic=on) for on in (True, False)
    )
    sampled = _sample(ours, groups, tokens)
    rows = _token_rows(sampled)
    with batch_invariant():
        outcome = evaluate(model, plan(rows, "rows", BUDGET, shape_of(model)).parts, rows.count)
    largest = float((outcome.logprobs_N - _recorded(sampled)).abs().max())
    some = _token_rows(sampled[:16])
    parts = plan(some, "rows", BUDGET, shape_of(model)).parts

    def train(on: bool) -> None:
        with batch_invariant(on):
            _train(model, parts, some.count)

    engine = _ratio(lambda: _cold(ours, 8, tokens), lambda: _cold(theirs, 8, tokens), repeats)
    return largest, rows.count, engine, _ratio(lambda: train(True), lambda: train(False), repeats)


def _cold(engine: Engine, groups: int, tokens: int, *, routes: bool = False) -> None:
    """Samples without what an earlier call has left in the prefix cache."""
    engine.cache.clear()
    _sample(engine, groups, tokens, routes=routes)


def _train(model: PreTrainedModel, parts: tuple[ForwardPass, ...], count: int) -> None:
    execute(model, parts, count, lambda logprobs_M, _: logprobs_M.sum() / count)


def _ratio(ours: Callable[[], None], theirs: Callable[[], None], repeats: int) -> float:
    """Processor seconds of one over the other: medians, measured in turns, after one for warmth."""
    seconds: list[tuple[float, float]] = []
    for _ in range(1 + repeats):
        start = time.process_time()
        ours()
        middle = time.process_time()
        theirs()
        seconds.append((middle - start, time.process_time() - middle))
    ours_, theirs_ = zip(*seconds[1:], strict=True)
    return statistics.median(ours_) / statistics.median(theirs_)
