"""Speculative edits inside an unmodified vLLM, against the same vLLM without, with its n-gram proposer tuned, and with
suffix decoding where that is installed. A part of `etude bench edits`, run where ETUDE_VLLM_PYTHON names a Python with
vLLM.

vllm/large, vllm/suite, vllm/batch-8   forced answers on random weights, as in edits.py: what a model that agrees gains
vllm/fp32                              what the bundled model says by itself, greedy: token for token

All systems live at once and are asked in turn, each on one thread, float32, eager.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from tokenizers import Tokenizer

from benchmarks.edit_cases import CONTEXT, MODEL, MODULES, Case, case, large_cases, random_model, source, suite_cases
from benchmarks.vllm_process import Vllm, missing
from etude.inference.server.fast_apply import Applier
from etude.renderers import renderer_for

PROPOSER = "etude.inference.vllm.proposer.Proposer"
OURS = {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": 128}
SUFFIX = {
    "method": "suffix", "num_speculative_tokens": 128, "suffix_decoding_max_tree_depth": 128,
    "suffix_decoding_max_spec_factor": 4.0,
}  # fmt: skip
OPTIONS = {"dtype": "float32", "max_num_seqs": 8, "prefix_caching": False, "eager": True}
Add = Callable[..., None]


def ngram(longest: int) -> dict[str, Any]:
    return {"method": "ngram", "prompt_lookup_min": 3, "prompt_lookup_max": 5, "num_speculative_tokens": longest}


def systems(quick: bool) -> dict[str, dict[str, Any] | None]:
    """vLLM's speculative_config by name; "plain" has none."""
    all_ = {"plain": None, "ours": OURS, "ngram-64": ngram(64)}
    if not quick:
        all_ |= {"ngram-10": ngram(10), "ngram-128": ngram(128)}
    if _importable("arctic_inference"):
        all_["suffix"] = SUFFIX
    return all_


def _importable(module: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([os.environ["ETUDE_VLLM_PYTHON"], "-c", code], timeout=120).returncode == 0


def measure(quick: bool, add: Add) -> tuple[dict[str, str], dict[str, bool]]:
    """Adds the rows; returns which are absent and why, and the checks."""
    if reason := missing():
        return {"vllm/*": reason}, {}
    absent = _speeds(quick, add)
    different = _lossless(_prompts(32 if quick else 96), 64, add)
    return absent, {"vLLM's greedy answers in float32 are the same with and without etude's drafts": different == 0}


# --- forced answers -------------------------------------------------------------------------------------------------


def _speeds(quick: bool, add: Add) -> dict[str, str]:
    applier = Applier(Tokenizer.from_file(str(MODEL / "tokenizer.json")), None)
    part = 96 if quick else 512
    groups = {"large": large_cases(applier, quick), "suite": suite_cases(applier, 8 if quick else 24)}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        random_model().save_pretrained(folder)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(MODEL / file, folder)
        running = {
            name: stack.enter_context(
                Vllm(**OPTIONS, model=folder, max_model_len=CONTEXT, speculative=config, force=True)
            )
            for name, config in systems(quick).items()
        }
        for vllm in running.values():
            _force(vllm, groups["suite"][:1])  # compiles what is compiled
        turns = {group: [_turns(running, [one], part) for one in cases] for group, cases in groups.items()}
        together = _turns(running, groups["suite"][:8])
    for group, cases in groups.items():
        tokens = [len(one.answer) for one in cases]
        what = f"decode alone, {len(cases)} edit(s) one at a time, {sum(tokens)} tokens, forced answers"
        _compare(group, turns[group], "decode", what, add)
        ours = [turn["ours"] for turn in turns[group]]
        per_pass = statistics.median(n / o["passes"] for n, o in zip(tokens, ours, strict=True))
        add(f"vllm/{group}/tokens-per-pass", per_pass, "1 in plain decoding; the prompt's pass is counted", "tokens")
        share = sum(o["accepted"] for o in ours) / max(1, sum(o["drafted"] for o in ours))
        add(f"vllm/{group}/accepted", share, "of etude's drafted tokens", "share")
    _compare("batch-8", [together], "seconds", "prefill included, 8 edits at once, forced answers", add)
    return {} if "suffix" in running else {"vllm/*/vs-suffix": "arctic-inference is not installed beside vLLM"}


def _force(vllm: Vllm, cases: Sequence[Case]) -> dict[str, Any]:
    answers = [list(one.answer) for one in cases]
    round_ = vllm.ask([one.request.ids for one in cases], [len(a) for a in answers], answers=answers)
    assert round_["ids"] == answers, "the forced answer was not given"
    return round_


def _turns(running: dict[str, Vllm], cases: Sequence[Case], part: int = 0) -> dict[str, dict[str, Any]]:
    """Every system answers the same requests, one after the other; of two rounds each one's faster. Of one answer,
    plain decoding makes `part` tokens only, in its middle."""

    def answered(name: str, vllm: Vllm) -> dict[str, Any]:
        return _in_part(vllm, cases[0], part) if part and name == "plain" else _force(vllm, cases)

    rounds = [{name: answered(name, vllm) for name, vllm in running.items()} for _ in range(2)]
    return {name: min((round_[name] for round_ in rounds), key=lambda r: r["seconds"]) for name in running}


def _in_part(vllm: Vllm, one: Case, tokens: int) -> dict[str, Any]:
    """A round whose `decode` is that of the whole answer, from `tokens` tokens in its middle."""
    middle = max(0, (len(one.answer) - tokens) // 2)
    answer = list(one.answer[middle : middle + tokens])
    round_ = vllm.ask([one.request.ids + list(one.answer[:middle])], [len(answer)], answers=[answer])
    assert round_["ids"] == [answer], "the forced answer was not given"
    return round_ | {"decode": round_["decode"] / max(1, len(answer) - 1) * (len(one.answer) - 1)}


def _compare(group: str, turns: list[dict[str, dict[str, Any]]], figure: str, what: str, add: Add) -> None:
    """Medians over the edits of other systems' seconds over ours; n-gram by its best setting per edit."""
    ngrams = [name for name in turns[0] if name.startswith("ngram")]
    rivals = {"speedup": ["plain"], "vs-ngram": ngrams, "vs-suffix": [name for name in turns[0] if name == "suffix"]}
    for rival, names in rivals.items():
        if names:
            gains = [min(turn[name][figure] for name in names) / turn["ours"][figure] for turn in turns]
            add(f"vllm/{group}/{rival}", statistics.median(gains), f"vLLM {' or '.join(names)}, {what}")


# --- what the bundled model says ------------------------------------------------------------------------------------


def _prompts(count: int) -> list[list[int]]:
    """In turn: an edit in the model's own dialect, and a file that begins again after its end, which it may repeat."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    applier = Applier(tokenizer, renderer_for(MODEL))
    prompts = []
    for i in range(count):
        lines = source(MODULES[i % len(MODULES)]).splitlines(keepends=True)
        start = 7 * i % max(1, len(lines) - 40)
        text = "".join(lines[start : start + 40])
        if i % 2:
            prompts.append(applier.encoder.encode(text + text[: len(text) // 3]))
        else:
            prompts.append(case(applier, text, edits=1, seed=i).request.ids)
    return prompts


def _lossless(prompts: list[list[int]], tokens: int, add: Add) -> int:
    """Greedy answers of the bundled model in float32, eight rows at a time; how many differ from plain vLLM's."""
    rounds = {}
    for name, config in {"plain": None, "ours": OURS}.items():
        with Vllm(**OPTIONS, model=str(MODEL), max_model_len=4096, speculative=config) as vllm:
            rounds[name] = vllm.ask(prompts, [tokens] * len(prompts))
    different = sum(a != b for a, b in zip(rounds["plain"]["ids"], rounds["ours"]["ids"], strict=True))
    ours = rounds["ours"]
    what = f"of {len(prompts)} greedy answers of {tokens} tokens, not forced, 8 rows at a time"
    add("vllm/fp32/mismatches", different, what, "answers")
    share = ours["accepted"] / max(1, ours["drafted"])
    add("vllm/fp32/accepted", share, f"of {ours['drafted']} drafted tokens in the same answers", "share")
    return different


if __name__ == "__main__":
    rows: list[dict[str, Any]] = []
    absent, checks = measure(
        "--quick" in sys.argv,
        lambda case, value, baseline, unit="x": rows.append(
            {"case": case, "value": value, "unit": unit, "baseline": baseline}
        ),
    )
    print(json.dumps({"bench": "edits_vllm", "rows": rows, "checks": checks, "absent": absent}))
