"""Speculative edits, against plain decoding and transformers' tuned prompt lookup.

What long files gain is taken with the bundled model's architecture, random weights, and *forced answers*: a hook on
the last norm adds to the hidden state what makes the right token win, for every system alike and at the full cost of
the model. These figures say what the loop gains when the model agrees with the edit, and nothing of a model's accuracy.
All others are what the bundled model says by itself.

large-small-edit      a file of 200 lines and more, at most 2 % of its tokens changed, forced answers
forced-suite          files of 20 to 120 lines with one to six edits, forced answers
unrelated-prediction  the bundled model so hot that it repeats nothing, with another text as the draft: the cost alone
vllm/...              the same drafts inside vLLM, where ETUDE_VLLM_PYTHON is set (edits_vllm.py)
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from benchmarks import edits_vllm
from benchmarks.edit_cases import MODEL, Case, large_cases, random_model, suite_cases
from benchmarks.threads import one_thread
from etude.config import EngineConfig
from etude.inference.engine.drafts import DraftSource
from etude.inference.engine.engine import Engine
from etude.inference.engine.requests import Request
from etude.inference.server.fast_apply import Applier
from etude.models import attention, experts
from etude.models.loading import load_model

FORCE = 100.0  # logits; a random model's own are of size 1


def run(quick: bool) -> dict[str, Any]:
    """Rows and checks; `quick` takes one file, fewer edits and fewer answers."""
    with one_thread():
        return _run(quick)


def _run(quick: bool) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []

    def add(case: str, value: float, baseline: str, unit: str = "x") -> None:
        rows.append({"case": case, "value": value, "unit": unit, "baseline": baseline})

    model = random_model()
    _use(model, attention.NAME, experts.NAME)
    applier = Applier(Tokenizer.from_file(str(MODEL / "tokenizer.json")), None)
    _large(model, large_cases(applier, quick), 64 if quick else 512, quick, add)
    _suite(model, suite_cases(applier, 8 if quick else 450), 16 if quick else 64, add)
    mismatches, explained = _bundled(24 if quick else 450, 24 if quick else 64, add)
    checks = {"greedy answers in float32 are those of plain decoding": mismatches == 0,
              "mismatches in bfloat16 lie within its rounding": explained}  # fmt: skip
    absent, more = edits_vllm.measure(quick, add)
    return {"bench": "edits", "rows": rows, "checks": checks | more, "absent": absent}


# --- forced answers -------------------------------------------------------------------------------------------------


def _use(model: PreTrainedModel, attend: str, route: str) -> None:
    model.set_attn_implementation(attend)
    model.set_experts_implementation(route)


@contextmanager
def _forced(model: PreTrainedModel, ids: list[int]) -> Iterator[list[float]]:
    """Whatever is fed, at position p the model's choice is ids[p + 1]. Gives the times at which passes begin."""
    begun: list[float] = []
    table = torch.tensor([*ids[1:], 0])
    weight_VD = model.get_output_embeddings().weight.detach()
    positions: list[torch.Tensor] = []

    def before(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        begun.append(time.perf_counter())
        position_ids = kwargs.get("position_ids")
        if position_ids is None:
            past, fed = kwargs.get("past_key_values"), kwargs["input_ids"].shape[1]
            start = past.get_seq_length() if past is not None else 0
            position_ids = torch.arange(start, start + fed)[None]
        positions[:] = [position_ids.clamp(max=len(table) - 1)]

    def after(_: Any, args: Any, hidden_BTD: torch.Tensor) -> torch.Tensor:
        target_BTD = weight_VD[table[positions[0]]]
        return hidden_BTD + FORCE * target_BTD / target_BTD.square().sum(-1, keepdim=True)

    decoder = model.get_decoder()
    hooks = [decoder.register_forward_pre_hook(before, with_kwargs=True), decoder.norm.register_forward_hook(after)]
    try:
        yield begun
    finally:
        for hook in hooks:
            hook.remove()


@dataclass(frozen=True)
class Seconds:
    prefill: float
    decode: float
    passes: int


def _ours(engine: Engine, case: Case) -> Seconds:
    """A whole answer, with the prompt computed anew."""
    engine.cache.clear()
    with _forced(engine.model, case.request.ids + list(case.answer)):
        start = time.perf_counter()
        row = engine.submit(case.request)
        while row.fed < len(case.request.ids):
            engine.step()
        first, steps = time.perf_counter(), engine.counters.steps
        while not row.future.done():
            engine.step()
        end = time.perf_counter()
    assert tuple(row.future.result().ids) == case.answer, "the forced answer was not given"
    return Seconds(first - start, end - first, engine.counters.steps - steps)


def _plain(engine: Engine, case: Case, tokens: int) -> float:
    """Seconds of plain decoding for the whole answer, from those of `tokens` tokens in its middle."""
    middle = max(0, (len(case.answer) - tokens) // 2)
    part = case.answer[middle : middle + tokens]
    ids = case.request.ids + list(case.answer[:middle])
    short = Case(Request(ids=ids, max_tokens=len(part), temperature=0.0), part, 0.0)
    return _ours(engine, short).decode / max(1, len(part) - 1) * (len(case.answer) - 1)


@torch.inference_mode()
def _lookup(model: PreTrainedModel, case: Case, n: int, k: int) -> float:
    """Seconds of decoding by transformers' prompt lookup: from the second pass on, the first one is the prompt's."""
    ids = torch.tensor([case.request.ids])
    _use(model, "sdpa", "grouped_mm")
    try:
        with _forced(model, case.request.ids + list(case.answer)) as begun:
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=len(case.answer), do_sample=False,
                pad_token_id=1, eos_token_id=None, prompt_lookup_num_tokens=k, max_matching_ngram_size=n,
            )  # fmt: skip
            end = time.perf_counter()
        assert tuple(out[0, ids.shape[1] :].tolist()) == case.answer, "the forced answer was not given"
        return end - begun[1]
    finally:
        _use(model, attention.NAME, experts.NAME)


# --- the measurements -----------------------------------------------------------------------------------------------


def _large(model: PreTrainedModel, cases: list[Case], tokens: int, quick: bool, add: Callable[..., None]) -> None:
    fast, plain = (
        Engine(model, EngineConfig(max_batch=1)),
        Engine(model, EngineConfig(max_batch=1, speculate=False)),
    )
    _ours(fast, cases[0])  # compiles the kernels, measures the costs
    settings = [(3, 64)] if quick else [(n, k) for n in (2, 3, 5) for k in (10, 32, 64, 128)]
    decode, whole, lookup, per_pass = [], [], [], []
    for case in cases:
        ours = [_ours(fast, case) for _ in range(1 if quick else 3)]
        best = min(ours, key=lambda s: s.decode)
        slow = _plain(plain, case, tokens)
        decode.append(slow / best.decode)
        whole.append((best.prefill + slow) / (best.prefill + best.decode))
        lookup.append(min(_lookup(model, case, n, k) for n, k in settings) / best.decode)
        per_pass.append(len(case.answer) / best.passes)
    shape = f"{len(cases)} file(s) of 200 lines and more, {max(c.changed for c in cases):.1%} of tokens changed at most"
    add("large-small-edit/speedup", statistics.median(decode), f"plain decoding, decode alone, {shape}, forced answers")
    add("large-small-edit/end-to-end", statistics.median(whole), "plain decoding, prefill included in both")
    tuned = "n 3, K 64" if quick else "best of n 2, 3, 5 and K 10, 32, 64, 128"
    add("large-small-edit/vs-tuned-lookup", statistics.median(lookup), f"transformers' prompt lookup, {tuned}, decode")
    add("large-small-edit/tokens-per-pass", statistics.median(per_pass), "1 in plain decoding", "tokens")


def _suite(model: PreTrainedModel, cases: list[Case], tokens: int, add: Callable[..., None]) -> None:
    fast, plain = (
        Engine(model, EngineConfig(max_batch=1)),
        Engine(model, EngineConfig(max_batch=1, speculate=False)),
    )
    gains = [_plain(plain, case, tokens) / _ours(fast, case).decode for case in cases]
    what = f"plain decoding, decode alone, {len(cases)} edits, forced answers"
    add("forced-suite/speedup-median", statistics.median(gains), what)
    add("forced-suite/speedup-p10", float(np.quantile(gains, 0.1)), "the tenth part that gains least")
    slower = sum(gain < 1 for gain in gains) / len(gains)
    add("forced-suite/slower", slower, "share of edits that are slower than plain decoding")


def _bundled(count: int, tokens: int, add: Callable[..., None]) -> tuple[int, bool]:
    """What the bundled model itself says, with drafts that are its answers edited, and with an unrelated one."""
    model = load_model(MODEL)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(32, model.config.vocab_size, 40).tolist() for _ in range(count)]
    requests = [Request(ids=ids, max_tokens=tokens, temperature=0.0) for ids in prompts]
    mismatches, margins = [], []
    for dtype in (torch.float32, torch.bfloat16):
        model.to(dtype)
        answers = _answers(Engine(model, EngineConfig(max_batch=16, speculate=False)), requests)
        drafted = [
            msgspec.structs.replace(r, sources=(_edited(a, rng),)) for r, a in zip(requests, answers, strict=True)
        ]
        again = _answers(Engine(model, EngineConfig(max_batch=16)), drafted)
        different = [(r, a, b) for r, a, b in zip(requests, answers, again, strict=True) if a != b]
        mismatches.append(len(different))
        margins += [_margin(model, r.ids, a, b) for r, a, b in different if dtype == torch.bfloat16]
    name = f"of {count} greedy answers of {tokens} tokens, edited answers as drafts, 16 rows at a time"
    add("fp32/mismatches", mismatches[0], name, "answers")
    largest = max(margins, default=0.0)
    add("bf16/mismatches", mismatches[1], f"{name}; the two tokens differ by {largest:.3f} in logit at most", "answers")
    model.to(torch.float32)
    what = "time of plain decoding, an unrelated text as prediction, at temperature 2.5"
    add("unrelated-prediction/cost", _unrelated(model, rng), what)
    return mismatches[0], largest < 1.0


def _answers(engine: Engine, requests: list[Request]) -> list[list[int]]:
    rows = [engine.submit(request) for request in requests]
    while not all(row.future.done() for row in rows):
        engine.step()
    return [row.future.result().ids for row in rows]


def _edited(answer: list[int], rng: np.random.Generator) -> DraftSource:
    ids = list(answer)
    for _ in range(int(rng.integers(0, 4))):
        at = int(rng.integers(0, len(ids)))
        ids[at : at + int(rng.integers(0, 3))] = rng.integers(32, 4096, int(rng.integers(0, 3))).tolist()
    return DraftSource("prediction", np.array(ids, np.int32))


@torch.inference_mode()
def _margin(model: PreTrainedModel, prompt: list[int], one: list[int], other: list[int]) -> float:
    """Difference in logit, in one plain pass, of the two tokens at which two answers part."""
    at = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
    logits_V = model(input_ids=torch.tensor([prompt + one[:at]]), use_cache=False).logits[0, -1].float()
    return abs(float(logits_V[one[at]] - logits_V[other[at]]))


def _unrelated(model: PreTrainedModel, rng: np.random.Generator) -> float:
    """Median of our seconds over those of plain decoding, turn by turn.

    At temperature 1 the model would repeat itself, and drafts from its own text would hide what the prediction costs.
    """
    fast, plain = (
        Engine(model, EngineConfig(max_batch=1)),
        Engine(model, EngineConfig(max_batch=1, speculate=False)),
    )
    source = DraftSource("prediction", rng.integers(32, 4096, 400).astype(np.int32))
    ratios = []
    for seed in range(9):
        request = Request(ids=rng.integers(32, 4096, 100).tolist(), max_tokens=60, seed=seed, temperature=2.5)
        times = []
        for engine, sources in ((plain, ()), (fast, (source,))):
            start = time.perf_counter()
            _answers(engine, [msgspec.structs.replace(request, sources=sources)])
            times.append(time.perf_counter() - start)
        ratios.append(times[1] / times[0])
    return statistics.median(ratios[1:])


if __name__ == "__main__":
    print(json.dumps(run(quick=True)))
