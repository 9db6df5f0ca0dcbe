"""The edits that benchmarks measure, and the model with random weights that their answers are forced upon."""

from __future__ import annotations

import difflib
import inspect
import random
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from etude.edits.edit import Edit
from etude.inference.engine.requests import Request
from etude.inference.server.fast_apply import Applier

MODEL = Path(__file__).parent.parent / "models" / "nano"
CONTEXT = 16384
MODULES = ("textwrap", "bisect", "heapq", "shlex", "fnmatch", "glob", "string", "colorsys", "sched", "contextlib",
           "copy", "calendar", "cmd", "csv", "dis", "filecmp", "fileinput", "gettext", "queue", "pprint")  # fmt: skip
LARGE = ("queue", "shlex", "textwrap")


@dataclass(frozen=True)
class Case:
    """One edit: what is asked, and the ids of its answer (the new file and the closing tag)."""

    request: Request
    answer: tuple[int, ...]
    changed: float  # share of the answer's tokens that are not the file's


def random_model() -> PreTrainedModel:
    """The bundled model's architecture with random weights, and a longer context."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(MODEL, max_position_embeddings=CONTEXT)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def source(name: str) -> str:
    return inspect.getsource(__import__(name))


def case(applier: Applier, text: str, edits: int, seed: int) -> Case:
    """`edits` lines of the file replaced, put in or left out, asked for by a sketch with two lines of context."""
    rng = random.Random(seed)
    before = text.splitlines(keepends=True)
    after = list(before)
    code = [i for i, line in enumerate(before) if len(line.strip()) > 8]
    for i in sorted(rng.sample(code, edits), reverse=True):
        indent = before[i][: len(before[i]) - len(before[i].lstrip())]
        kind = rng.choice(("replace", "insert", "delete"))
        new = (
            []
            if kind == "delete"
            else [f"{indent}checked_{rng.randrange(100)} = validate(value, {rng.random():.2f})\n"]
        )
        after[i : i + (kind != "insert")] = new
    request, close = applier.request(Edit(text, sketch(before, after), "Apply the edit."), CONTEXT)
    answer = tuple(applier.encode_answer("".join(after) + close))
    file = applier.encode_answer(text + close)
    blocks = difflib.SequenceMatcher(None, file, answer, autojunk=False).get_matching_blocks()
    changed = 1 - sum(block.size for block in blocks) / len(answer)
    return Case(msgspec.structs.replace(request, max_tokens=len(answer)), answer, changed)


def sketch(before: list[str], after: list[str]) -> str:
    groups = difflib.SequenceMatcher(None, before, after, autojunk=False).get_grouped_opcodes(2)
    hunks = ["".join(after[group[0][3] : group[-1][4]]) for group in groups]
    marker = "# ... existing code ...\n"
    return marker + marker.join(hunk if hunk.endswith("\n") else hunk + "\n" for hunk in hunks) + marker


def large_cases(applier: Applier, quick: bool) -> list[Case]:
    """One edit in each of a few whole modules."""
    return [case(applier, source(name), edits=1, seed=i) for i, name in enumerate(LARGE[: 1 if quick else None])]


def suite_cases(applier: Applier, count: int) -> list[Case]:
    """One to six edits in 20 to 120 lines of some module."""
    rng = random.Random(0)
    cases = []
    for i in range(count):
        lines = source(rng.choice(MODULES)).splitlines(keepends=True)
        size = min(len(lines), rng.randint(20, 120))
        start = rng.randrange(len(lines) - size + 1)
        cases.append(case(applier, "".join(lines[start : start + size]), edits=rng.randint(1, 6), seed=i))
    return cases
