"""`etude eval MODEL --suite fast-apply`: how often a model applies a sketched edit correctly, graded without a judge.

The deterministic merge is graded on the same edits, as the baseline of every model. An edit that does not fit the
model's context is a failure, and is also counted separately. Edits of a task dataset have tests. A language model may
judge failed answers; its verdicts are counted apart from the grades.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from etude.config import EngineConfig, SandboxConfig
from etude.corpus.edits import bin_name
from etude.edits import (
    DoesNotFit,
    Edit,
    EditGrade,
    Example,
    NotClosed,
    grade_edit,
    lines_changed_outside,
    load_examples,
)
from etude.edits.judge import Judge, JudgeVerdict, judge_answers
from etude.errors import UserError
from etude.evals import tested_edits
from etude.evals.stats import Estimate, paired_difference, pass_rate
from etude.evals.tested_edits import Tested

SUITE = Path(__file__).parents[1] / "edits" / "suite" / "heldout.parquet"
_MAX_BATCH = 8  # edits in the engine at a time
_SECONDS = 1800.0  # without one finished edit
_LENGTHS = (20, 40, 100, 400)


@dataclass(frozen=True)
class Applied:
    """The result of one edit by one applier."""

    example: Example
    grade: EditGrade
    outside: int  # changes outside the edit's hunks; 0 without an answer
    fits: bool  # whether the edit fits the applier's context
    text: str | None = None  # the file with the edit applied; None without an answer
    tokens: int = 0
    verdict: JudgeVerdict | None = None  # of a judge, if the grade is fail and there is a file

    @property
    def answered(self) -> bool:
        """Whether the answer gives a file to grade."""
        return self.text is not None


def evaluate_edits(
    models: Sequence[Path],
    suite: Path,
    inference: EngineConfig,
    *,
    max_edits: int | None,
    as_json: bool,
    tests: Path | None = None,
    split: str = "heldout",
    judge: Judge | None = None,
    boxes: SandboxConfig | None = None,
) -> None:
    """Print grades with 95 % intervals, by language, size and noise. Raises UserError. With `tests`, a task dataset,
    the edits are those that undo the mutations of its split. `judge` judges failed answers. Tests run in boxes of the
    table [sandbox] `boxes`."""
    dataset = None if tests is None else tested_edits.load(tests, split)
    whole = list(dataset.examples) if dataset else load_examples(SUITE if suite == Path("fast-apply") else suite)
    examples = whole[:max_edits]
    if not examples:
        raise UserError("the suite holds no edits: raise --max-tasks")
    answers = [("merge", [merged(example) for example in examples], 0.0)]
    answers += [(str(model), *run(model, examples, inference)) for model in models]
    named = [(name, judged(with_tests(applied, dataset, boxes), judge), seconds) for name, applied, seconds in answers]
    for name, applied, seconds in named:
        _show(name, applied, seconds)
    report = {
        "suite": str(tests or suite),
        "edits": len(examples),
        "results": [{"model": n, "seconds": round(seconds, 1), **summary(applied)} for n, applied, seconds in named],
    }
    if len(models) == 2:
        first, second = ([[a.grade == EditGrade.EXACT] for a in applied] for _, applied, _ in named[1:])
        difference = paired_difference(first, second, _clusters(examples))
        print(f"second minus first, exact: {difference.points}")
        report["paired_diff"] = msgspec.to_builtins(difference)
    if as_json:
        print(json.dumps(report))


def merged(example: Example) -> Applied:
    """The grade of the deterministic merge; an edit that it refuses has no answer."""
    try:
        text = Edit(example.file, example.sketch, path=example.path).merged()
    except UserError:
        return Applied(example, EditGrade.FAIL, 0, True)
    return _graded(example, text, 0)


def with_tests(applied: Sequence[Applied], dataset: Tested | None, boxes: SandboxConfig | None = None) -> list[Applied]:
    """The results with the grade `tests` for failed answers that pass the tests of their edit and change nothing
    outside its hunks."""
    result = list(applied)
    if dataset is not None:
        failed = [i for i, a in enumerate(applied) if a.grade == EditGrade.FAIL and a.answered and not a.outside]
        passed = tested_edits.passing(dataset, [(applied[i].example, applied[i].text or "") for i in failed], boxes)
        for i in (i for i, good in zip(failed, passed, strict=True) if good):
            result[i] = replace(result[i], grade=EditGrade.TESTS)
    return result


def judged(applied: Sequence[Applied], judge: Judge | None) -> list[Applied]:
    """The results with a verdict on every failed answer."""
    if judge is None:
        return list(applied)
    failed = [i for i, a in enumerate(applied) if a.grade == EditGrade.FAIL and a.answered]
    result = list(applied)
    answers = judge_answers(judge, [(applied[i].example, applied[i].text or "") for i in failed])
    for i, verdict in zip(failed, answers, strict=True):
        result[i] = replace(result[i], verdict=verdict)
    return result


def run(
    folder: Path, examples: Sequence[Example], inference: EngineConfig = EngineConfig()
) -> tuple[list[Applied], float]:
    """Apply every edit with the model of a folder, greedily and with drafts. Returns the results and the seconds.
    Raises UserError."""
    from etude.inference.engine.loading import load_engine
    from etude.inference.engine.requests import RunningSequence
    from etude.inference.server.fast_apply import AnswerCollector, Applier
    from etude.renderers import load_tokenizer, renderer_for

    engine = load_engine(folder, inference.model_copy(update={"max_batch": _MAX_BATCH}))
    has_chat = (folder / "chat_template.jinja").is_file()
    applier = Applier(load_tokenizer(folder), renderer_for(folder, tools=False) if has_chat else None)
    pending: list[tuple[RunningSequence, AnswerCollector] | None] = []
    start = time.monotonic()
    for example in examples:
        edit = Edit(example.file, example.sketch, example.instruction)
        try:
            request, close = applier.request(edit, engine.max_length)
        except DoesNotFit:
            pending.append(None)
            continue
        answer = applier.collector(close)
        row = engine.submit(request, answer)
        answer.watch(row)
        pending.append((row, answer))
    engine.start()
    try:
        applied = [_answered(example, each) for example, each in zip(examples, pending, strict=True)]
    finally:
        engine.close()
    return applied, time.monotonic() - start


def _answered(example: Example, pending) -> Applied:
    if pending is None:
        return Applied(example, EditGrade.FAIL, 0, False)
    row, answer = pending
    try:
        row.future.result(_SECONDS)
        text = answer.text()
    except TimeoutError:
        raise UserError(f"the model gave no answer within {_SECONDS:.0f} seconds: use a smaller one") from None
    except NotClosed:
        text = None
    if text is None:
        return Applied(example, EditGrade.FAIL, 0, True, tokens=len(answer.ids))
    return _graded(example, text, len(answer.ids))


def _graded(example: Example, text: str, tokens: int) -> Applied:
    edit_grade = grade_edit(example.result, text, example.language)
    stray = 0 if edit_grade == EditGrade.EXACT else lines_changed_outside(example.file, example.result, text)
    return Applied(example, edit_grade, stray, True, text, tokens)


def summary(applied: Sequence[Applied]) -> dict[str, object]:
    """Shares of all edits as JSON, and the exact share by group, with intervals over files."""
    count = len(applied)
    groups = {name: {k: _group(part) for k, part in sorted(_split(applied, f).items())} for name, f in _GROUPS.items()}
    return {
        "exact": msgspec.to_builtins(_exact(applied)),
        "right": msgspec.to_builtins(_rate(applied, lambda a: a.grade != EditGrade.FAIL)),
        "grades": {str(g): sum(a.grade == g for a in applied) / count for g in EditGrade},
        "fits": sum(a.fits for a in applied) / count,
        "exact_of_those_that_fit": _group([a for a in applied if a.fits]),
        "answered": sum(a.answered for a in applied) / count,
        "changed_outside": sum(a.outside > 0 for a in applied) / count,
        "judge": {str(v): n for v in JudgeVerdict if (n := sum(a.verdict == v for a in applied))},
        "by": groups,
    }


_GROUPS: dict[str, Callable[[Example], Sequence[str]]] = {
    "language": lambda e: [e.language],
    "lines": lambda e: [next((f"up to {n:3}" for n in _LENGTHS if e.lines <= n), "more")],
    "share changed": lambda e: [f"{e.size + 1}: {bin_name(e.size)}"],
    "kind": lambda e: [e.kind],
    "noise": lambda e: e.noise or ("none",),
}


def _split(applied: Sequence[Applied], keys: Callable[[Example], Sequence[str]]) -> dict[str, list[Applied]]:
    groups: dict[str, list[Applied]] = defaultdict(list)
    for each in applied:
        for key in keys(each.example):
            groups[key].append(each)
    return groups


def _group(part: Sequence[Applied]) -> dict[str, object]:
    return {"edits": len(part), **(msgspec.to_builtins(_exact(part)) if part else {})}


def _rate(applied: Sequence[Applied], right: Callable[[Applied], bool]) -> Estimate:
    return pass_rate([[right(a)] for a in applied], _clusters([a.example for a in applied]))


def _exact(applied: Sequence[Applied]) -> Estimate:
    return _rate(applied, lambda a: a.grade == EditGrade.EXACT)


def _clusters(examples: Sequence[Example]) -> list[str]:
    """The cluster of each edit: its file, since edits of one file are dependent."""
    return [f"{e.repository}/{e.path}" for e in examples]


def _show(name: str, applied: Sequence[Applied], seconds: float) -> None:
    count, grades = len(applied), Counter(a.grade for a in applied)
    shares = ", ".join(f"{g} {100 * grades[g] / count:.1f} %" for g in EditGrade)
    print(f"{name}, {count} edits: exact {_exact(applied).percent}")
    print(f"  first grade that holds: {shares}")
    fitting = [a for a in applied if a.fits]
    if len(fitting) < count and fitting:
        print(f"  {len(fitting)} fit the context: {_exact(fitting).percent} exact")
    stray = sum(a.outside > 0 for a in applied)
    print(f"  changes outside the hunks: {stray} answers; no usable answer: {sum(not a.answered for a in applied)}")
    if judgements := [a.verdict for a in applied if a.verdict is not None]:
        counts = ", ".join(f"{v} {n}" for v, n in Counter(judgements).most_common())
        print(f"  judge, of {len(judgements)} answers that failed, no part of the grades: {counts}")
    if seconds:
        print(f"  {sum(a.tokens for a in applied)} tokens in {seconds:.0f} s")
    for title, keys in _GROUPS.items():
        for key, part in sorted(_split(applied, keys).items()):
            print(f"  {title:14} {key:18} {len(part):4} {_exact(part).percent}")
