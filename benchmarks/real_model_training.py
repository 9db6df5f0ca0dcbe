"""A real model in training: the trainer's log-probabilities against the engine's, and the size of a version."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.real_model_speed import texts
from benchmarks.table import Table
from benchmarks.weights import scatter
from etude.config import EngineConfig, TrainerConfig
from etude.inference.engine.engine import Engine
from etude.inference.engine.requests import Request
from etude.models.dtypes import published_dtypes
from etude.models.loading import load_model
from etude.renderers import renderer_for
from etude.renderers.base import PlainEncoder, load_tokenizer
from etude.store import open_store
from etude.trainer.optimizer import for_policy
from etude.trainer.rl.execution import evaluate
from etude.trainer.rl.mismatch import Mismatch
from etude.trainer.rl.plan import TokenRows, plan, shape_of
from etude.weights.publisher import Publisher
from etude.weights.ulpd.chunk_grid import bits

GROUP, PROMPT = 4, 150
RATES = (1e-6, 2e-6, 1e-5, 1e-4)
QUESTION = "Write a Python function that says whether a number is prime."
ANSWER = """def is_prime(n):
    if n < 2:
        return False
    i = 2
    while i * i <= n:
        if n % i == 0:
            return False
        i += 1
    return True
"""


def mismatch(folder: Path, quick: bool) -> dict[str, Any]:
    """k3 of sampled answers, trainer and engine in the same type."""
    table, encoder = Table("real-model/mismatch"), PlainEncoder(load_tokenizer(folder))
    prompts = texts(encoder, 2 if quick else 8, PROMPT, 11)
    for dtype in (torch.bfloat16, torch.float32):
        model, name = load_model(folder, dtype=dtype), str(dtype).removeprefix("torch.")
        engine = Engine(model, EngineConfig(max_batch=32))
        requests = [
            Request(ids=ids, max_tokens=8 if quick else 32, seed=GROUP * g + m)
            for g, ids in enumerate(prompts)
            for m in range(GROUP)
        ]
        running = [engine.submit(request) for request in requests]
        while not all(row.future.done() for row in running):
            engine.step()
        answers = [row.future.result() for row in running]
        pairs = zip(requests, answers, strict=True)
        ids = tuple(np.array(request.ids + answer.ids) for request, answer in pairs)
        rows = TokenRows(ids, tuple(np.arange(PROMPT, len(row)) for row in ids))
        outcome = evaluate(model, plan(rows, "auto", 4096, shape_of(model)).parts, rows.count)
        recorded = torch.tensor(np.concatenate([a.logprobs for a in answers]), dtype=torch.float32)
        mismatch = Mismatch()
        mismatch.add(outcome.logprobs_N, recorded)
        means, what = mismatch.metrics("m"), f"{rows.count} tokens sampled at temperature 1, both sides in {name}"
        for figure in ("k3", "k3_clip", "max_abs"):
            table.add(f"{name}/{figure}", means[f"m/{figure}"], "nats", what)
    return table.result()


def deltas(folder: Path, quick: bool) -> dict[str, Any]:
    """What of the weights one step changes, and what of them travels: the first step from the model's own weights,
    whose masters lie in the middle of what rounds to them, and one from masters anywhere, as after a long run."""
    table, conversation = Table("real-model/deltas"), _conversation(folder)
    for rate in RATES[-1:] if quick else RATES:
        for settled in (False, True):
            _delta(table, folder, conversation, rate, settled)
    return table.result()


def _delta(table: Table, folder: Path, conversation: tuple[list[int], list[int]], rate: float, settled: bool) -> None:
    model = load_model(folder, dtype=torch.bfloat16)
    types = published_dtypes(folder, model, torch.bfloat16)
    optimizer = for_policy(model, TrainerConfig(lr=rate, warmup_steps=0), types)
    if settled:
        scatter(optimizer, torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory() as store:
        publisher = Publisher(open_store(f"file://{store}"))
        before = {name: bits(t).copy() for name, t in optimizer.published().items()}
        publisher.publish(0, optimizer.published(), (), {})
        _backward(model, *conversation)
        norm = optimizer.collect()
        optimizer.apply(rate)
        after = optimizer.published()
        sent = publisher.publish(1, after, (0,), {}, lr=rate).payload_bytes
    changed = sum(int((before[name] != bits(t)).sum()) for name, t in after.items())
    total, size = sum(t.numel() for t in after.values()), sum(t.nbytes for t in after.values())
    case = f"lr {rate:g}/{'masters anywhere' if settled else 'first step'}"
    what = f"{total:,} weights, one AdamW step on one conversation, norm of the gradient {norm:.2g}"
    table.add(f"{case}/changed", changed / total, "share", what)
    table.add(f"{case}/bytes", sent, "bytes", f"{size:,} bytes of all weights")
    table.add(f"{case}/whole over delta", size / sent, "x", "all weights / the delta")


def _conversation(folder: Path) -> tuple[list[int], list[int]]:
    renderer, encoder = renderer_for(folder, tools=False), PlainEncoder(load_tokenizer(folder))
    return renderer.prompt([{"role": "user", "content": QUESTION}]), [*encoder.encode(ANSWER), *renderer.stop_ids[:1]]


def _backward(model: PreTrainedModel, prompt: list[int], answer: list[int]) -> None:
    """The gradient of the mean loss of the answer's tokens."""
    ids = torch.tensor([prompt + answer])
    model.set_attn_implementation("sdpa")
    labels = torch.tensor([[-100] * len(prompt) + answer])
    model(input_ids=ids, labels=labels, use_cache=False).loss.backward()
