"""A run as it might have gone, made of the real records. Deterministic."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np

from etude.dashboard.report import MismatchSummary, RunReport, RunSetup, TrainingFigures, Utilisation, held_out_figures
from etude.dashboard.view import ShownEpisode
from etude.evals.stats import pass_at_k, pass_rate
from etude.evals.suite import EvalResult, TaskResult
from etude.records import Episode, Outcome, Segment, StopReason, ToolCall, Turn

BROKEN = """def chunk(array, size=1):
    chunks = int(ceil(len(array) / float(size)))
    return [array[i * size : (i - 1) * size] for i in range(chunks)]
"""
OLD = "array[i * size : (i - 1) * size]"
NEW = "array[i * size : (i + 1) * size]"


def pieces(text: str) -> list[str]:
    """Token-like pieces: special tokens whole, other text in words with their leading space."""
    out: list[str] = []
    while text:
        if text.startswith("<|"):
            cut = text.index("|>") + 2
        else:
            cut = next((i for i in range(1, len(text)) if text[i] in " \n([.<" or i == 7), len(text))
        out.append(text[:cut])
        text = text[cut:]
    return out


def make_episode(
    number: int,
    turns: list[tuple[list[ToolCall], list[str]]],
    passed: bool,
    version: int = 0,
    outcome: Outcome = Outcome.SCORED,
    detail: str = "",
) -> tuple[Episode, list[str]]:
    """An episode in the compact dialect and the text of each of its tokens."""
    rng = np.random.default_rng(number)
    prompt = pieces(f"<|user|>Fix `chunk` in src/pydash/arrays.py\n{BROKEN}<|end|>")
    texts, mask, starts = [*prompt, "<|assistant|>"], [0] * (len(prompt) + 1), []
    records: list[Turn] = []
    for calls, results in turns:
        written = "".join(
            f"<|call|>{c.name}" + "".join(f"<|arg|>{v}" for v in (c.arguments or {}).values()) for c in calls
        )
        said = pieces(written + "<|end|>")
        starts.append(len(texts))
        texts += said
        mask += [1] * len(said)
        answer = pieces("<|tool|>" + "\n".join(results) + "<|end|><|assistant|>") if results else []
        texts += answer
        mask += [0] * len(answer)
        records.append(
            Turn(text=written, calls=tuple(calls), results=tuple(results), seconds_model=0.21, seconds_tools=0.04)
        )
    mask_T = np.array(mask, "u1")
    logprobs = np.where(mask_T == 1, -rng.exponential(0.6, len(texts)), 0.0)
    versions = np.where(mask_T == 1, version + (np.arange(len(texts)) > starts[-1] if starts else 0), -1)
    segment = Segment(
        ids=np.arange(len(texts), dtype="<i4").tobytes(),
        mask=mask_T.tobytes(),
        logprobs=logprobs.astype("<f4").tobytes(),
        versions=versions.astype("<i4").tobytes(),
        prompt_length=len(prompt) + 1,
        turn_starts=tuple(starts),
    )
    counts = [c.name for calls, _ in turns for c in calls]
    episode = Episode(
        id=f"e{number:05d}", group_id=number // 16, member=number % 16, attempt=0, task_id="pydash-chunk-op_change-0",
        seed=1000 + number, outcome=outcome, stop_reason=StopReason.FINISHED if passed else StopReason.TURNS,
        reward=float(passed), passed=passed, segments=(segment,), turns=tuple(records),
        metrics={"turns": len(turns), "tests_run": counts.count("test"), "edits": counts.count("edit"), "malformed": 0},
        detail=detail,
    )  # fmt: skip
    return episode, texts


def edit(old: str, new: str) -> ToolCall:
    return ToolCall(name="edit", arguments={"old": old, "new": new})


def call(name: str) -> ToolCall:
    return ToolCall(name=name, arguments={})


SOLVED = [([edit(OLD, NEW), call("test")], ["ok", "passed"]), ([call("finish")], [])]
RETRIED = [
    ([edit("(i - 1)", "(i + 2)"), call("test")], ["ok", "failed: doctest:chunk: Expected [[1, 2], [3, 4], [5]]"]),
    ([call("undo"), edit(OLD, NEW), call("test")], ["undone", "ok", "passed"]),
    ([call("finish")], []),
]
STUCK = [
    ([edit("size=1", "size=2")], ["ok"]),
    ([edit("chunkz", "chunks")], ["error: no match"]),
    ([ToolCall(name="edt", arguments=None, error="unknown tool edt")], ["error: unknown tool edt"]),
    ([call("test")], ["failed: doctest:chunk: Expected [[1, 2], [3, 4], [5]] but got [[], [], []]"]),
]


def shown_episodes() -> list[ShownEpisode]:
    scripts = [(SOLVED, True), (RETRIED, True), (STUCK, False), (STUCK[:2], False)]
    shown: list[ShownEpisode] = []
    for number in range(14):
        stage = ("before", "training", "training", "after")[number % 4]
        turns, passed = scripts[(number * 7 + number // 4) % 4]
        outcome = Outcome.TIMEOUT if number == 9 else Outcome.SCORED
        episode, texts = make_episode(
            number, turns, passed and outcome is Outcome.SCORED, version=number * 3, outcome=outcome,
            detail="" if passed else "test_chunk[case1]: AssertionError: assert [[], []] == [[1, 2], [3]]",
        )  # fmt: skip
        advantage = (0.65 if episode.passed else -0.35) * (1 if number % 3 else 0.4)
        shown.append(ShownEpisode(f"chunk · op_change #{number}", episode, advantage, texts, stage))
    return shown


def eval_result(rate: float, tasks: int = 90, samples: int = 4) -> EvalResult:
    """`tasks` tasks of a third as many functions; the same task is hard for every `rate`."""
    rng = np.random.default_rng(1)
    ease = np.repeat(rng.normal(0, 0.2, tasks), samples).reshape(tasks, samples)
    passed = [tuple(map(bool, row)) for row in rng.random((tasks, samples)) < rate + ease]
    functions = [f"src/pydash/m.py::f{i // 3}" for i in range(tasks)]
    behaviour = {
        "turns": 2.2 + rate, "tests_run": 0.5 + rate * 2, "edits": 1.4, "edit_errors": 0.6 - rate,
        "malformed": 0.3 - rate / 2, "undo": rate, "sampled_tokens": 64.0 + 20 * rate,
    }  # fmt: skip
    return EvalResult(
        split="heldout",
        seed=1,
        samples=samples,
        seconds=20.0,
        tasks=tuple(
            TaskResult(
                id=f"t{i}", function=functions[i], passed=passed[i], lost=0, damage=("op_flip", "bool_flip")[i % 2]
            )
            for i in range(tasks)
        ),
        pass_1=pass_rate(passed, functions),
        pass_k={k: sum(pass_at_k(samples, sum(p), k) for p in passed) / tasks for k in (1, 2, 4)},
        outcomes={"scored": tasks * samples - 2, "timeout": 2},
        retries=0,
        stops={"finished": tasks * samples},
        behaviour=behaviour,
    )


def write_run(folder: Path, steps: int = 120) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(7)
    now, lines = 1_800_000_100.0, []
    for step in range(1, steps + 1):
        seconds = 5.4 + rng.normal(0, 0.3)
        now += seconds
        learnt = 1 - math.exp(-step / 45)
        rate = 0.22 + 0.25 * learnt + rng.normal(0, 0.03)
        shipped = 8_100_000 if step % 16 == 0 else int(620_000 + rng.normal(0, 40_000))
        lines.append({
            "step": step, "time": now, "time/step": seconds, "time/wait_for_batch": 0.9 + abs(rng.normal(0, 0.2)),
            "reward/all/mean": rate + 0.02, "rollout/pass_rate": rate,
            "rollout/turns": 2.4 + 0.7 * learnt + rng.normal(0, 0.05),
            "rollout/tests_run": 0.8 + learnt + rng.normal(0, 0.05),
            "rollout/edits": 1.3 + 0.3 * learnt, "rollout/edit_errors": 0.5 - 0.4 * learnt,
            "rollout/undo": 0.1 + 0.3 * learnt, "rollout/length": 70 + 12 * learnt,
            "rollout/malformed": 0.25 * (1 - learnt) + abs(rng.normal(0, 0.01)),
            "rollout/retries": int(step == 40), "rollout/zero_variance": float(rng.integers(3, 8)),
            "off_policy/mean": 0.6 + rng.normal(0, 0.1), "off_policy/max": 1 + int(step % 9 == 0),
            "off_policy/histogram": {"0": 4000 + step, "1": 6000, "2": 300 * (step % 9 == 0)},
            "mismatch/k2": 3e-7 * math.exp(rng.normal(0, 0.5)), "mismatch/k3": 3.1e-7 * math.exp(rng.normal(0, 0.5)),
            "off_policy/k2": 4e-4 * math.exp(rng.normal(0, 0.4)), "outcome/timeout": float(step % 31 == 0),
            "mismatch/max_abs": 0.004 * math.exp(rng.normal(0, 0.6)), "entropy/mean": 0.9 - 0.3 * learnt,
            "optim/grad_norm": 0.5 + rng.exponential(0.1), "optim/lr": 2e-4 * min(1, step / 3),
            "weights/version": step, "weights/bytes": shipped, "weights/changed": 0.14 + rng.normal(0, 0.01),
            "perf/trainer_busy": 0.82 + rng.normal(0, 0.04), "perf/engine_busy": 0.9 + rng.normal(0, 0.03),
            "perf/tokens_per_s": 1700 + rng.normal(0, 80),
        })  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "timeline.jsonl").write_text("".join(json.dumps(span) + "\n" for span in timeline(steps, rng)))
    return folder


def timeline(steps: int, rng: np.random.Generator) -> list[dict]:
    spans: list[dict] = []

    def add(process: str, state: str, start: float, end: float) -> None:
        spans.append({"process": process, "state": state, "start": 1_800_000_000 + start, "end": 1_800_000_000 + end})

    stages = [
        ("build tasks", 55.0),
        ("eval before", 45.0),
        ("train", 5.4 * steps),
        ("eval after", 44.0),
        ("report", 2.0),
    ]
    clock = 0.0
    for stage, seconds in stages:
        add("controller", stage, clock, clock + seconds)
        busy = {"build tasks": 0.0, "train": 0.9, "report": 0.0}.get(stage, 0.97)
        t = clock
        while t < clock + seconds:
            on, off = (4.0 * busy, 4.0 * (1 - busy)) if busy else (0.0, 4.0)
            add("engine", "prefill", t, t + on * 0.2)
            add("engine", "decode", t + on * 0.2, t + on)
            add("engine", "waiting for requests", t + on, t + on + off)
            add("sandbox", "running tests", t, t + 1.1 + rng.random())
            t += 4.0
        if stage == "train":
            for step in range(steps):
                start = clock + 5.4 * step
                wait = 0.9 + 0.3 * rng.random()
                add("trainer", "waiting for a batch", start, start + wait)
                add("trainer", "forward and backward", start + wait, start + 4.9)
                add("trainer", "publish", start + 4.9, start + 5.4)
        clock += seconds
    return spans


def make_report(steps: int = 120) -> RunReport:
    before, after = eval_result(0.22), eval_result(0.36)
    held_out, difference = held_out_figures(before, after)
    return RunReport(
        seed=1, seconds=791.0, steps=steps, episodes={"scored": 15_230, "timeout": 12, "tampered": 3, "infra": 1},
        versions=steps + 1, bytes_published=steps * 1_080_000, utilisation=Utilisation(trainer=0.82, engine=0.9),
        mismatch=MismatchSummary(k2=3.2e-7, k3=3.3e-7, max_abs=0.021),
        checks={"ledger_conserved": True, "weights_digest_served": True, "tokens_prefix_property": True},
        setup=RunSetup("demo", "nano (8M Qwen3-MoE)", "pydash-8.1.0", "2 CPU cores"),
        stages={"build tasks": 55.0, "eval before": 45.0, "train": 5.4 * steps, "eval after": 44.0, "report": 2.0},
        training=TrainingFigures(
            tasks=170, groups=480, new=(0.31, 0.42), again=120, first=0.34, last=0.61, teach=0.62, teach_later=0.71,
            entropy=(0.28, 0.12),
        ),
        pass_before=before.pass_1.mean, pass_after=after.pass_1.mean, paired_diff=difference, held_out=held_out,
    )  # fmt: skip
