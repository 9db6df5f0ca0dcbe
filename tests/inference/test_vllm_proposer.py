"""The drafts that vLLM gets, without vLLM: rows come without names, move, wait and have equal prompts."""

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from etude.edits.edit import Edit
from etude.errors import UserError
from etude.inference.engine.costs import LearnedCosts
from etude.inference.server.fast_apply import Applier
from etude.inference.vllm.proposer import SequenceDrafts, sources

TOKENIZER = Tokenizer.from_file(str(Path(__file__).parents[2] / "models" / "nano" / "tokenizer.json"))
APPLIER = Applier(TOKENIZER, None)
CONTEXT = 4096


def edit(seed):
    """Prompt and answer of an edit: one line replaced, one put in."""
    rng = random.Random(seed)
    lines = [f"def function_{rng.randrange(10**6)}(value):\n    return value + {rng.random()}\n" for _ in range(20)]
    new = f"def other_{rng.randrange(10**6)}(value):\n    return {rng.random()}\n"
    at = rng.randrange(1, 18)
    after = [*lines[:at], new, *lines[at + 1 :]]
    sketch = f"# ... existing code ...\n{lines[at - 1]}{new}{lines[at + 1]}# ... existing code ...\n"
    request, close = APPLIER.request(Edit("".join(lines), sketch), CONTEXT)
    return request.ids, APPLIER.encode_answer("".join(after) + close)


class Target:
    """A model that gives known answers to prompts, verifying drafts as vLLM's greedy rejection sampler does."""

    def __init__(self, drafts, cases, seed=0):
        self.drafts, self.rng, self.passes, self.drafted = drafts, random.Random(seed), 0, 0
        self.rows = [{"prompt": p, "answer": a, "out": [], "draft": []} for p, a in cases]
        self.now = 0.0

    def step(self, rows, waiting=()):
        """One pass over `rows`; `waiting` are rows whose prompt is fed in part only. The buffer's rows are new ones."""
        order = [*rows, *waiting]
        self.rng.shuffle(order)
        sampled = []
        for row in order:
            if row in waiting:
                sampled.append([])
                continue
            rest = row["answer"][len(row["out"]) :]
            right = next((i for i, (a, b) in enumerate(zip(row["draft"], rest, strict=False)) if a != b), None)
            kept = len(row["draft"]) if right is None else right
            sampled.append(rest[: kept + 1])
            row["out"] += sampled[-1]
            self.drafted += len(row["draft"])
        ids_RT = np.zeros((len(order), CONTEXT), np.int32)
        lengths = []
        for r, row in enumerate(order):
            tokens = row["prompt"] + row["out"]
            ids_RT[r, : len(tokens)] = tokens
            lengths.append(len(tokens))
        given = self.drafts.after_pass(sampled, np.array(lengths), ids_RT)
        assert len(given) == len(order)
        for row, draft in zip(order, given, strict=True):
            assert row not in waiting or draft == []
            assert len(draft) <= 64
            assert all(type(token) is int for token in draft)
            row["draft"] = draft
        self.passes += 1

    def unfinished(self):
        return [row for row in self.rows if len(row["out"]) < len(row["answer"])]


def drafts(clock=None, longest=64, max_length=CONTEXT, rows=16):
    """With a clock that tells the same cost for every pass, drafts are as long as they may be."""
    ticks = iter(range(10**9))
    return SequenceDrafts(TOKENIZER, longest, max_length, rows, clock or (lambda: float(next(ticks))))


def test_an_answer_takes_few_passes():
    prompt, answer = edit(0)
    target = Target(drafts(), [(prompt, answer)])
    while rows := target.unfinished():
        target.step(rows)
    assert target.rows[0]["out"][: len(answer)] == answer
    # Drafts of 64 for an answer that is the merge: one pass each, one for the prompt, and a few shorter drafts.
    assert target.passes <= len(answer) / 64 + 8


def test_rows_that_move_wait_and_repeat_keep_their_drafts():
    cases = [edit(seed) for seed in (1, 2, 3, 4)] + [edit(1), edit(1)]
    alone = []
    for case in cases:
        target = Target(drafts(), [case])
        while rows := target.unfinished():
            target.step(rows)
        alone.append(target.passes)
    target = Target(drafts(), cases, seed=5)
    late = target.rows[2]
    steps = 0
    while rows := target.unfinished():
        steps += 1
        # A prompt in parts at first, and a row that is preempted for a while.
        waiting = [late] if steps <= 3 else []
        absent = [target.rows[0]] if 4 <= steps <= 6 else []
        target.step([row for row in rows if row not in waiting and row not in absent], waiting)
    assert all(row["out"][: len(row["answer"])] == row["answer"] for row in target.rows)
    assert target.passes <= max(alone) + 3 + 3 + 4


def test_a_file_that_the_answer_leaves_and_comes_back_to():
    prompt, _ = edit(6)
    file = next(source for source in sources(TOKENIZER, prompt) if source.name == "file").ids.tolist()
    rng = np.random.default_rng(0)
    answer = [*file[:150], *rng.integers(200, 4000, 10).tolist(), *file[150:400], *file[430:]]
    target = Target(drafts(), [(prompt, answer)])
    while rows := target.unfinished():
        target.step(rows)
    assert target.passes <= len(answer) / 64 + 10 + 15  # the 10 foreign tokens one by one, and a few to find the way


def test_the_answer_may_begin_with_its_tag_or_not():
    prompt, _ = edit(7)
    with_tag = [source.ids.tolist() for source in sources(TOKENIZER, prompt)]
    opening = APPLIER.encoder.encode("<updated-code>\n")
    assert prompt[-len(opening) :] == opening
    without = [source.ids.tolist() for source in sources(TOKENIZER, prompt[: -len(opening)])]
    assert [ids[: len(opening)] for ids in without[:2]] == [opening, opening]
    assert [ids[len(opening) :] for ids in without[:2]] == with_tag[:2]


def test_without_an_edit_a_row_repeats_itself():
    loop = APPLIER.encoder.encode("for i in range(3):\n    print(i)\n" * 6)
    assert sources(TOKENIZER, loop[:60]) == ()
    target = Target(drafts(), [(loop[:60], loop[60:])])
    while rows := target.unfinished():
        target.step(rows)
    assert target.passes < len(loop[60:]) / 3


def test_useless_drafts_end_where_passes_cost_what_their_tokens_do():
    prompt, _ = edit(8)
    answer = np.random.default_rng(1).integers(200, 4000, 300).tolist()
    target: Target

    # Twice as long for 16 tokens more; the clock is asked at the end of a pass and when the drafts are given.
    def clock():
        fed = sum(1 + len(row["draft"]) for row in target.rows) if reads[0] % 2 == 0 else 0
        reads[0] += 1
        target.now += 1e-3 * (1 + fed / 16) if fed else 0.0
        return target.now

    reads = [0]
    target = Target(None, [(prompt, answer)])
    target.drafts = drafts(clock)
    while rows := target.unfinished():
        target.step(rows)
    assert 0 < target.drafted < 150
    assert target.passes == len(answer)


def test_drafts_end_before_the_context_does():
    prompt, answer = edit(9)
    limit = len(prompt) + 40
    rows = drafts(max_length=limit)
    ids_RT = np.zeros((1, CONTEXT), np.int32)
    for n in (1, 20, 38, 39, 40):
        ids_RT[0, : len(prompt) + n] = [*prompt, *answer[:n]]
        (draft,) = rows.after_pass([answer[:1] if n == 1 else answer[n - 1 : n]], [len(prompt) + n], ids_RT)
        assert len(draft) <= max(0, 40 - n - 1)


def test_more_than_vllm_can_verify_is_refused():
    with pytest.raises(UserError, match="1 to 128"):
        drafts(longest=129)


def test_costs_are_learned_and_forgotten():
    costs = LearnedCosts()
    assert costs.curve().seconds(65) == pytest.approx(2 * costs.curve().seconds(1))  # nothing is known
    for _ in range(50):
        costs.note(1, 0.01)
        costs.note(100, 0.03)
    assert costs.curve().seconds(100) == pytest.approx(0.03)
    costs.note(100, 100.0)  # someone else had the machine
    assert costs.curve().seconds(100) < 0.05
    for _ in range(500):
        costs.note(1, 0.01)
    assert costs.curve().seconds(65) == pytest.approx(0.02)


def test_it_imports_nothing_that_vllm_does_not_bring():
    code = "import json, sys, etude.inference.vllm.proposer; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    roots = {name.split(".")[0] for name in json.loads(done.stdout)}
    foreign = {"torch", "transformers", "vllm", "blake3", "cryptography", "httpx2", "obstore", "xxhash", "zstandard"}
    assert not roots & foreign
    assert {"numba", "numpy", "tokenizers"} <= roots
