"""Speed of a real model: the engine beside transformers' `generate` and llama.cpp, edits, and documents."""

from __future__ import annotations

import difflib
import inspect
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks import documents, llama_cpp
from benchmarks.edit_cases import Case, case
from benchmarks.table import Table
from etude.config import EngineConfig
from etude.inference.engine import runner
from etude.inference.engine.drafts import DraftSource
from etude.inference.engine.engine import Engine
from etude.inference.engine.requests import Request
from etude.inference.server.fast_apply import Applier
from etude.models.loading import load_model
from etude.renderers import renderer_for
from etude.renderers.base import PlainEncoder, load_tokenizer

PROMPT = 250
MODULES = ("argparse", "ast", "calendar", "cgitb", "cmd", "codecs", "csv", "datetime", "decimal", "dis", "doctest",
           "fileinput", "ftplib", "gettext", "heapq", "inspect", "locale", "mailbox", "nntplib", "optparse", "pdb",
           "pickle", "platform", "plistlib", "poplib", "pprint", "queue", "random", "sched", "shlex", "shutil",
           "smtplib", "statistics", "string", "tarfile", "textwrap", "threading", "trace", "uuid")  # fmt: skip
EDITED = (
    ("queue", "Rename the class `Empty` to `QueueEmpty`."),
    ("shlex", "Rename the method `push_token` to `put_back`."),
    ("textwrap", "Change the default width from 70 to 88."),
    ("sched", "Rename the parameter `timefunc` to `clock`."),
)
LINES = 200
BATCHES = {1: (32, 3), 8: (8, 2), 32: (4, 1)}  # tokens of an answer, and rounds
QUICK = {1: (12, 1), 8: (6, 1), 32: (3, 1)}
KINDS = {"F16": "its fastest type that holds these weights", "Q4_1": "another arithmetic: four bits a weight"}


@dataclass(frozen=True)
class System:
    """One that answers rounds: prompts, tokens of each answer -> seconds of all, seconds after the last first token."""

    name: str
    ask: Callable[[list[list[int]], int], tuple[float, float]]


@dataclass(frozen=True)
class Timed:
    """One answer: its tokens, and seconds until the first token and after it."""

    ids: list[int]
    prefill: float
    decode: float
    passes: int


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


def texts(encoder: PlainEncoder, count: int, length: int, seed: int) -> list[list[int]]:
    """Pieces of so many tokens of the standard library's source: different ones for different seeds."""
    rng, pieces = np.random.default_rng(seed), []
    while len(pieces) < count:
        ids = encoder.encode(inspect.getsource(__import__(str(rng.choice(MODULES))))[:60_000])
        start = int(rng.integers(0, max(1, len(ids) - length)))
        pieces += [ids[start : start + length]] if len(ids) >= start + length else []
    return pieces


# --- the engine -----------------------------------------------------------------------------------------------------


def engine(folder: Path, quick: bool, threads: int, batch: int) -> dict[str, Any]:
    """Rows at one batch of the engine in both types, transformers and llama.cpp, which answer each round in turn."""
    table, encoder = Table(f"real-model/engine-b{batch}"), PlainEncoder(load_tokenizer(folder))
    absent = {"llama.cpp": llama_cpp.missing()} if llama_cpp.missing() else {}
    with ExitStack() as stack, tempfile.TemporaryDirectory() as made:
        systems, about = [], {}
        for dtype in (torch.bfloat16, torch.float32):
            name, model = str(dtype).removeprefix("torch."), load_model(folder, dtype=dtype)
            plain = load_model(folder, dtype=dtype)
            plain.set_attn_implementation("sdpa")
            systems += [System(f"etude {name}", _engine(model)), System(f"transformers {name}", _generate(plain))]
        for kind, why in () if absent else KINDS.items():
            if batch > 1 and kind == "Q4_1":
                continue
            file = Path(made) / f"{kind}.gguf"
            llama_cpp.write_gguf(folder, file, kind)
            options = {"model": str(file), "rows": batch, "length": 384, "threads": threads}
            process = stack.enter_context(llama_cpp.LlamaCpp(**options))
            about = {"llama.cpp": process.about}
            systems.append(System(f"llama.cpp {kind} ({why})", _llama(process)))
        for system in systems:
            system.ask(texts(encoder, 1, PROMPT, 1), 4)  # compiles, and learns
        _rounds(table, systems, encoder, batch, *(QUICK if quick else BATCHES)[batch])
    return table.result() | {"absent": absent, "about": about}


def _rounds(
    table: Table, systems: Sequence[System], encoder: PlainEncoder, batch: int, tokens: int, rounds: int
) -> None:
    taken: dict[str, list[tuple[float, float]]] = {system.name: [] for system in systems}
    for number in range(rounds):
        prompts = texts(encoder, batch, PROMPT, 1000 * batch + number)
        for system in systems:
            taken[system.name].append(system.ask(prompts, tokens))
    what = f"{batch} rows of {PROMPT} tokens and {tokens} more, median of {rounds} rounds"
    for name, seconds in taken.items():
        decode = statistics.median(batch * (tokens - 1) / after for _, after in seconds)
        table.add(f"b{batch}/{name}/decode", decode, "tokens/s", f"after the last first token; {what}")
        whole = statistics.median(total for total, _ in seconds)
        table.add(f"b{batch}/{name}/seconds", whole, "s", f"submission to last token; {what}")
    for ours in ("etude bfloat16", "etude float32"):
        for name in taken:
            if name.startswith("etude") or (name.startswith("transformers") and name.split()[1] != ours.split()[1]):
                continue
            pairs = list(zip(taken[name], taken[ours], strict=True))
            for part, which in enumerate(("whole", "decode")):
                ratios = [theirs[part] / mine[part] for theirs, mine in pairs]
                table.add(f"b{batch}/{ours} over {name}/{which}", statistics.median(ratios), "x", span(ratios))


def span(ratios: Sequence[float]) -> str:
    """From the least to the largest."""
    return f"from {min(ratios):.2f} to {max(ratios):.2f}"


def _engine(model: PreTrainedModel) -> Callable[[list[list[int]], int], tuple[float, float]]:
    one = Engine(model, EngineConfig(max_batch=max(BATCHES), speculate=False))  # the same work as the others

    def ask(prompts: list[list[int]], tokens: int) -> tuple[float, float]:
        start = time.perf_counter()
        rows = [one.submit(Request(ids=ids, max_tokens=tokens, seed=i)) for i, ids in enumerate(prompts)]
        while any(row.fed < len(row.request.ids) for row in rows):
            one.step()
        first = time.perf_counter()
        while not all(row.future.done() for row in rows):
            one.step()
        end = time.perf_counter()
        return end - start, end - first

    return ask


def _generate(model: PreTrainedModel) -> Callable[[list[list[int]], int], tuple[float, float]]:
    begun: list[float] = []
    model.register_forward_pre_hook(lambda *_: begun.append(time.perf_counter()))

    @torch.inference_mode()
    def ask(prompts: list[list[int]], tokens: int) -> tuple[float, float]:
        begun.clear()
        ids = torch.tensor(prompts)
        start = time.perf_counter()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=True,
            top_k=0, pad_token_id=1,
        )  # fmt: skip
        end = time.perf_counter()
        return end - start, end - begun[1]

    return ask


def _llama(process: llama_cpp.LlamaCpp) -> Callable[[list[list[int]], int], tuple[float, float]]:
    def ask(prompts: list[list[int]], tokens: int) -> tuple[float, float]:
        answer = process.ask(prompts, tokens)
        assert answer["sampled"] == len(prompts) * tokens, answer
        return answer["seconds"], answer["decode"]

    return ask


# --- speculative edits ----------------------------------------------------------------------------------------------


def rewrites(folder: Path, quick: bool) -> dict[str, Any]:
    """The model's own greedy rewrites of files, float32: with the file as draft and plain; and forced answers."""
    table = Table("real-model/edits")
    model, encoder, renderer = (
        load_model(folder),
        PlainEncoder(load_tokenizer(folder)),
        renderer_for(folder, tools=False),
    )
    fast, plain = (Engine(model, EngineConfig(max_batch=1, speculate=on)) for on in (True, False))
    tokens, gains, different = 32 if quick else 160, [], 0
    for name, change in EDITED[: 1 if quick else None]:
        file = head_of_file(inspect.getsource(__import__(name)))
        request = _rewrite(encoder, renderer, file, change, tokens)
        for one in (fast, plain) if not gains else ():
            timed(one, msgspec.structs.replace(request, max_tokens=4))
        slow, quick_ = timed(plain, msgspec.structs.replace(request, sources=())), timed(fast, request)
        differ = sum(a != b for a, b in zip(slow.ids, quick_.ids, strict=True))
        gains.append(slow.decode / quick_.decode)
        different += differ
        _add_rewrite(table, name, slow, quick_, encoder.encode(file), differ)
    what = f"plain decoding, {len(gains)} own greedy answers of at most {tokens} tokens, decode alone, {span(gains)}"
    table.add("own/speed-up", statistics.median(gains), "x", what)
    table.add("own/tokens that differ", different, "tokens", "plain decoding, float32")
    table.checks["own rewrites with drafts are those of plain decoding"] = different == 0
    applier, forced = Applier(load_tokenizer(folder), renderer), []
    for seed, (name, _) in enumerate(EDITED[: 1 if quick else 2]):
        one = case(applier, head_of_file(inspect.getsource(__import__(name))), edits=1, seed=seed)
        forced.append(_plain_seconds(plain, one, 48) / _forced(fast, one).decode)
    what = f"plain decoding, {len(forced)} files of {LINES} lines with one line changed, given answers, {span(forced)}"
    table.add("forced/speed-up", statistics.median(forced), "x", what)
    table.checks["files that are copied: at least 8 x"] = statistics.median(forced) >= 8.0
    return table.result()


def head_of_file(text: str) -> str:
    """The first lines of a file."""
    return "".join(text.splitlines(keepends=True)[:LINES])


@contextmanager
def forced_answer(ids: Sequence[int]) -> Iterator[None]:
    """Whatever is fed, at position p the model's choice is ids[p + 1], at the full cost of the model."""
    computed, table = runner.logits_of, torch.tensor([*ids[1:], 0])

    def logits_of(
        model: Any, cache: Any, pages: Any, ids_N: Any, slot_N: Any, position_N: Any, sampled_S: Any, **options: Any
    ) -> torch.Tensor:
        logits_SV = computed(model, cache, pages, ids_N, slot_N, position_N, sampled_S, **options)
        next_S = table[torch.from_numpy(position_N[sampled_S]).clamp(max=len(table) - 1)]
        return logits_SV.scatter_(1, next_S[:, None], 1e3)

    runner.logits_of = logits_of
    try:
        yield
    finally:
        runner.logits_of = computed


def _forced(engine: Engine, case: Case) -> Timed:
    with forced_answer(case.request.ids + list(case.answer)):
        measured = timed(engine, case.request)
    assert tuple(measured.ids) == case.answer, "the given answer did not come"
    return measured


def _plain_seconds(engine: Engine, case: Case, tokens: int) -> float:
    """Seconds of plain decoding for the whole answer, from those of some tokens in its middle."""
    middle = max(0, (len(case.answer) - tokens) // 2)
    part = case.answer[middle : middle + tokens]
    ids = case.request.ids + list(case.answer[:middle])
    measured = _forced(engine, Case(Request(ids=ids, max_tokens=len(part), temperature=0.0), part, 0.0))
    return measured.decode / (len(part) - 1) * (len(case.answer) - 1)


def _rewrite(encoder: PlainEncoder, renderer: Any, file: str, change: str, tokens: int) -> Request:
    content = f"Rewrite this file with one change: {change} Answer with the whole file and nothing else.\n\n"
    opening = f"```python\n{file[: file.index(chr(10)) + 1]}"  # the first line, too: it begins as the file does
    ids = renderer.prompt([{"role": "user", "content": f"{content}```python\n{file}```"}]) + encoder.encode(opening)
    source = DraftSource("prediction", np.array(encoder.encode(file), np.int32))
    return Request(ids=ids, max_tokens=tokens, temperature=0.0, stop=tuple(renderer.stop_ids), sources=(source,))


def _add_rewrite(table: Table, name: str, slow: Timed, quick: Timed, file: list[int], differ: int) -> None:
    copied = copied_share(slow.ids, file)
    what = (
        f"plain decoding; {len(slow.ids)} tokens, {copied:.0%} of them copied from the file, "
        f"{len(quick.ids) / quick.passes:.1f} tokens a pass, {differ} differ"
    )
    table.add(f"own/{name}", slow.decode / quick.decode, "x", what)


def copied_share(answer: Sequence[int], file: Sequence[int]) -> float:
    """Share of an answer's tokens that stand in the file in the same order, in runs of eight and more."""
    blocks = difflib.SequenceMatcher(None, list(file), list(answer), autojunk=False).get_matching_blocks()
    return sum(block.size for block in blocks if block.size >= 8) / max(1, len(answer))


# --- documents ------------------------------------------------------------------------------------------------------


def first_tokens(folder: Path, quick: bool) -> dict[str, Any]:
    """Seconds to the first token with documents in the cache against a plain prompt of the same tokens, float32."""
    table, model, encoder = Table("real-model/documents"), load_model(folder), PlainEncoder(load_tokenizer(folder))
    one, rng = Engine(model, EngineConfig(speculate=False)), np.random.default_rng(0)
    fulls, repeats = (1, 1) if quick else (1, 3)
    for count in (4,) if quick else (10,):
        full, warm, tail, cold, _ = documents.times(one, rng, count, fulls, repeats)
        shape = f"{count} documents of {documents.LENGTH} tokens and {documents.TAIL} after them"
        table.add(
            f"{count}/first token", full / warm, "x", f"{full:.2f} s for the same tokens as a plain prompt; {shape}"
        )
        table.add(f"{count}/warm", warm, "s", shape)
        table.add(f"{count}/cold", cold, "s", "the first request with these documents")
        table.add(f"{count}/tail", warm / tail, "x", f"the {documents.TAIL} tokens alone, {tail:.3f} s")
    pieces = texts(encoder, 4 if quick else 10, documents.LENGTH, 7)
    difference, same = documents.difference_from_one_pass(model, one, rng, pieces)
    table.add("logits", difference, "logit", f"one masked forward pass, {len(pieces)} pieces of source code, float32")
    table.checks["the first token is that of one masked pass"] = same
    return table.result()
