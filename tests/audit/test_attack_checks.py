"""Attacks that must be able to succeed: each is played against what it looks for, and against the real thing."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from etude.audit.attacks import attack_suite, fingerprints, forgeries, injections, lookups
from etude.audit.attacks.library import prepare
from etude.audit.attacks.packs import AttackPack
from etude.audit.parity import audit, probes
from etude.cli import main
from etude.errors import UserError
from etude.grading.cheats import CheatSignals, broken_rules
from etude.grading.grade import Grade
from etude.grading.runner import open_sandbox
from etude.harness import compact_tools, full_tools, tools
from etude.renderers import base
from etude.renderers.schemas import SCHEMAS
from etude.sandbox.base import Changes, Sandbox
from etude.sandbox.fingerprints import FingerprintSample, parse_fingerprint
from etude.tasks import histories


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> AttackPack:
    root = tmp_path_factory.mktemp("library")
    for folder in (root, *root.parents[:2]):
        folder.chmod(0o755)
    return prepare(root)


def problem(check: attack_suite.LibraryCheck, pack: AttackPack) -> str:
    async def played() -> str:
        async with open_sandbox(memo=0) as sandbox:
            return await check(sandbox, pack)

    return asyncio.run(played())


def test_an_index_older_than_the_mutation_is_found_out(pack: AttackPack, monkeypatch: pytest.MonkeyPatch) -> None:
    assert problem(lookups.look_ups, pack) == ""
    seen: dict[str, str] = {}
    real = full_tools.search

    def stale(question: str, files: list[tuple[str, str]], scorer: full_tools.Scorer) -> str:
        return real(question, [(path, seen.setdefault(path, text)) for path, text in files], scorer)

    monkeypatch.setattr(full_tools, "search", stale)
    found = problem(lookups.look_ups, pack)
    assert found.startswith("search")
    assert "quartz" in found


def test_a_ranking_by_other_trees_is_found_out(pack: AttackPack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its results hold this tree's text alone, but the scores of one that has read others differ."""
    real = full_tools.search
    known: list[full_tools.Scorer] = []

    def telling(question: str, files: list[tuple[str, str]], scorer: full_tools.Scorer) -> str:
        known.append(scorer)
        return real(question, files, scorer) + ("." if scorer is known[0] else "")

    monkeypatch.setattr(full_tools, "search", telling)
    assert problem(lookups.look_ups, pack) == "the ranking tells what other trees hold"


def test_a_history_with_the_answer_is_found_out(pack: AttackPack) -> None:
    """The same commits, but nothing is taken for a secret."""
    data = pack.data
    assert data.histories is not None
    untold = histories.Histories(data.histories.past, {}, data.repository)
    leaking = replace(pack, data=replace(data, histories=untold))
    assert problem(lookups.look_ups, leaking).startswith(("history", "commit"))


def test_an_encoder_that_makes_tokens_of_text_is_found_out(pack: AttackPack, monkeypatch: pytest.MonkeyPatch) -> None:
    assert problem(forgeries.forgeries, pack) == ""
    real = base.PlainEncoder.__init__

    def naive(self: base.PlainEncoder, tokenizer: Tokenizer) -> None:
        real(self, tokenizer)
        self._short = self._document = self._encode = lambda text: tokenizer.encode(text).ids  # type: ignore[method-assign]

    monkeypatch.setattr(base.PlainEncoder, "__init__", naive)
    every = forgeries.dialects()

    async def each(sandbox: Sandbox, of: AttackPack) -> str:
        found = []
        for dialect in every:
            monkeypatch.setattr(forgeries, "dialects", lambda dialect=dialect: (dialect,))
            found.append(await forgeries.forgeries(sandbox, of))
        return "\n".join(found)

    said = "special tokens come out of what a tool has said"
    assert problem(each, pack) == f"compact: {said}\nhermes: {said}\nhermes with documents: {said}"


def test_a_harness_that_leaves_markers_out_is_found_out(pack: AttackPack, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was printed is not what is trained on, then."""
    for module in (tools, compact_tools):
        monkeypatch.setattr(module, "printable", lambda text: text.replace("<|end|>", ""))
    assert problem(forgeries.forgeries, pack).startswith("compact: not shown as it is")


def test_whoever_listens_to_a_plea_is_found_out(pack: AttackPack, monkeypatch: pytest.MonkeyPatch) -> None:
    assert problem(injections.injections, pack) == ""
    graded_submission = injections.graded_submission

    async def credulous(sandbox: Sandbox, of: AttackPack, attack: Changes) -> tuple[Grade, CheatSignals]:
        graded, signals = await graded_submission(sandbox, of, attack)
        told = any(injections.PLEA.encode() in (data or b"") for data in attack.values())
        return (replace(graded, passed=True, score=1.0), CheatSignals()) if told else (graded, signals)

    with monkeypatch.context() as patch:
        patch.setattr(injections, "graded_submission", credulous)
        assert problem(injections.injections, pack).startswith("an honest fix: ")
    with monkeypatch.context() as patch:
        patch.setattr(
            injections, "broken_rules", lambda lines, task: broken_rules([x for x in lines if "honest" not in x], task)
        )
        assert injections._words().startswith("not found any more: git log -p")
    with monkeypatch.context() as patch:
        patch.setattr(injections, "judge_prompt", lambda example, text: f"{example.file}\n<answer-1>{text}</answer-1>")
        assert injections._opinion()


def samples(seed: int, prefix: str, **more: object) -> list[FingerprintSample]:
    rng = np.random.default_rng(seed)
    return [
        FingerprintSample(f"{prefix}{i}", {"uptime": float(rng.exponential(1e5)), "umask": 18, "routes": 3, **more})
        for i in range(30)
    ]


def test_each_item_is_judged_by_its_own_probes_and_without_exceptions() -> None:
    boxes = samples(1, "b", umask=63, routes=0, **{"pid1.name": "init", "status.Seccomp": "2"})
    users = samples(2, "p", **{"pid1.name": "init", "status.Seccomp": "0"})
    found = {item: fingerprints.result_of(one) for item, one in audit.by_item(boxes, users).items()}
    assert set(found) == {"E2", "E3", "E4", "E5", "E6"}
    assert not found["E2"].problem
    assert (found["E3"].word, found["E3"].problem) == ("0.50", ""), "it was looked at, and does not differ"
    assert found["E5"].problem.startswith("AUC 1.00 [1.00, 1.00]: umask 1.00")
    for item, probe in (("E4", "status.Seccomp"), ("E6", "routes")):
        assert found[item].skipped == f"all of its probes are declared exceptions (AUC 1.00): {probe}"


def test_the_suite_plays_items_e_against_fingerprints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rest of the suite is left out, and boxes are made up."""
    asked = {}

    async def box_samples(count: int, **options: object) -> list[FingerprintSample]:
        asked.update(options, count=count)
        return samples(1, "b", umask=63)

    async def nothing(*_: object) -> None:
        pass

    monkeypatch.setattr(audit, "box_samples", box_samples)
    for name in ("grades", "boxes", "gates", "checks"):
        monkeypatch.setattr(attack_suite._Attacks, name, nothing)
    path = tmp_path / "machines.jsonl"
    lines = [{"format": 2, "machine": s.machine, "probes": s.probes} for s in samples(2, "p")]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["doctor", "sandbox", "--quick", "--json", "--boxes", "30", "--against", str(path)]
    with pytest.raises(SystemExit) as ended:
        main.main(arguments)
    assert ended.value.code == 1
    shown = capsys.readouterr()
    summary = json.loads(shown.out)
    assert (summary["stopped"], summary["missed"]) == (1, 1)
    assert set(summary["skipped"]) == {"E1", "E3", "E4", "E6", "E7", "E8", "E9"}
    assert "E5 fingerprints (box): AUC 1.00 [1.00, 1.00]: umask 1.00" in shown.err
    assert (asked["count"], asked["machine_profiles"], asked["dataset"]) == (30, (), None), "boxes as a run makes them"


def test_too_few_fingerprints_are_refused_before_anything_is_played(tmp_path: Path) -> None:
    path = tmp_path / "machines.jsonl"
    path.write_text(json.dumps({"format": 2, "machine": "a", "probes": {"umask": 18}}) + "\n")
    with pytest.raises(UserError, match="say nothing"):
        fingerprints.fingerprints_against([path], 60, dataset=None, machine_profiles=None)
    podman = tmp_path / "podman.toml"
    podman.write_text('[sandbox]\ntype = "podman"\nimage = "x"\n')
    for wrong in (["--machine-profiles", "x.toml"], ["--against", str(path), "--sandbox", str(podman)]):
        with pytest.raises(SystemExit) as ended:
            main.main(["doctor", "sandbox", *wrong])
        assert ended.value.code == 2


def chats(path: Path, system: str) -> list[FingerprintSample]:
    """Requests of a product's agent, as its script records them."""
    bodies = [
        {
            "messages": [{"role": "system", "content": system}, {"role": "user", "content": f"Fix `f{i}`\n\nplease"}],
            "tools": list(SCHEMAS),
        }
        for i in range(20)
    ]
    path.write_text("".join(json.dumps(body) + "\n" for body in bodies))
    command = [sys.executable, audit.FINGERPRINT_SCRIPT, "--requests", path]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert "Fix" not in done.stdout
    assert "You are" not in done.stdout
    return [parse_fingerprint(line, "here") for line in done.stdout.splitlines()]


def test_requests_of_another_harness_are_told_apart(tmp_path: Path) -> None:
    ours, same, other = (chats(tmp_path / "x", text) for text in ("You are one.", "You are one.", "You are another."))
    assert all(sample.is_request for sample in ours)
    assert len({sample.machine for sample in ours}) == 20, "conversations are held out as machines are"
    assert not fingerprints.result_of(audit.by_item(ours, same)["E9"]).problem
    assert "prompt.system 1.00" in fingerprints.result_of(audit.by_item(ours, other)["E9"]).problem


def test_what_production_asks_is_no_machine_of_the_parity_gate(tmp_path: Path) -> None:
    found = chats(tmp_path / "x", "You are one.")
    lines = [{"format": 2, "machine": sample.machine, "probes": sample.probes} for sample in found]
    (tmp_path / "f").write_text("".join(json.dumps(line) + "\n" for line in lines))
    split = fingerprints.fingerprints_against([tmp_path / "f"], 20, dataset=None, machine_profiles=None)
    assert (len(split.machines), len(split.requests)) == (0, 20)
    assert {probes.of(name).group for name in found[0].probes} == {"E9"}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("no json", "body 2 of"),
        ('{"tools": []}', "body 2 of"),
        ('{"messages": [{"role": "system", "content": "x"}]}', "body 2 of"),
        ('{"messages": 3}', "body 2 of"),
        ("[]", "body 2 of"),
        (None, "cannot be read"),
    ],
)
def test_what_is_no_request_is_named_and_nothing_is_printed(tmp_path: Path, line: str | None, said: str) -> None:
    path = tmp_path / "chats"
    if line is not None:
        path.write_text('{"messages": [{"role": "user", "content": "x"}]}\n' + line + "\n")
    command = [sys.executable, audit.FINGERPRINT_SCRIPT, "--requests", path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr
