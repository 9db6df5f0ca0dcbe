"""The parity audit: the classifier against what it must find and must not, machine_profiles in real boxes."""

from __future__ import annotations

import asyncio
import json
import os
import random
from pathlib import Path

import msgspec
import numpy as np
import pytest

from etude.audit.parity import audit, fingerprint, probes
from etude.audit.parity.classifier import auc, folds, interval, logistic, scores, stumps
from etude.audit.parity.features import table
from etude.cli.doctor_reports import show_parity
from etude.errors import UserError
from etude.grading.runner import open_sandbox
from etude.sandbox import machine_description, machine_profile
from etude.sandbox.base import Image, Limits
from etude.sandbox.fingerprints import FORMAT, FingerprintSample, parse_fingerprint, read_fingerprints


def test_auc_is_the_share_of_ordered_pairs() -> None:
    rng = np.random.default_rng(0)
    scores_N, labels_N = rng.integers(0, 6, 60).astype(float), (rng.random(60) < 0.4).astype(float)
    pairs = [(a > b) + 0.5 * (a == b) for a in scores_N[labels_N == 1] for b in scores_N[labels_N == 0]]
    assert auc(scores_N, labels_N) == pytest.approx(np.mean(pairs))
    with pytest.raises(ValueError, match="both classes"):
        auc(scores_N, np.ones(60))


def test_each_classifier_finds_what_it_is_there_for() -> None:
    """Many small differences add up for the regression; one range of values is a stump's."""
    rng = np.random.default_rng(1)
    labels_N = np.repeat([0.0, 1.0], 150)
    machines = [f"m{i}" for i in range(300)]
    fold_N = folds(machines, labels_N)
    small_NC = rng.normal(size=(300, 40)) + 0.25 * labels_N[:, None]
    assert auc(scores(small_NC, labels_N, fold_N, logistic), labels_N) > 0.75
    inner = rng.uniform(-1, 1, 300) * np.where(labels_N == 1, 0.3, 1.0)
    assert auc(scores(inner[:, None], labels_N, fold_N, logistic), labels_N) < 0.65
    assert auc(scores(inner[:, None], labels_N, fold_N, stumps), labels_N) > 0.75


@pytest.mark.parametrize("fit", [logistic, stumps])
def test_equal_populations_are_not_told_apart(fit) -> None:
    """Over ten draws of two equal populations the mean AUC is 0.5 within 0.05: its standard error is 0.011."""
    found = []
    for seed in range(10):
        rng = np.random.default_rng(seed)
        labels_N = np.repeat([0.0, 1.0], 100)
        machines = [f"{label}/{i // 5}" for i, label in enumerate(labels_N)]
        scores_N = scores(rng.normal(size=(200, 15)), labels_N, folds(machines, labels_N), fit)
        estimate = interval(scores_N, labels_N, machines)
        assert estimate.low < estimate.mean < estimate.high
        found.append(estimate.mean)
    assert abs(np.mean(found) - 0.5) < 0.05


def test_a_machine_is_in_one_fold() -> None:
    labels_N = np.array([0.0] * 40 + [1.0] * 40)
    machines = [f"p{i % 8}" for i in range(40)] + [f"b{i}" for i in range(40)]
    fold_N = folds(machines, labels_N)
    assert all(len({fold_N[i] for i in range(80) if machines[i] == name}) == 1 for name in set(machines))
    assert all(set(labels_N[fold_N == fold]) == {0.0, 1.0} for fold in set(fold_N))


def test_peculiarities_of_single_machines_do_not_count_as_a_difference() -> None:
    """Each machine has its own kernel and disk; boxes are drawn from the same population."""
    rng = np.random.default_rng(3)

    def population(prefix: str, size: int, each: int) -> list[FingerprintSample]:
        made = []
        for i in range(size):
            own = {"kernel": f"5.{rng.integers(30)}", "disk.size": float(rng.integers(1, 40)) * 1e9}
            made += [
                FingerprintSample(f"{prefix}{i}", own | {"uptime": float(rng.exponential(1e5))}) for _ in range(each)
            ]
        return made

    found = audit.compare(population("b", 100, 1), population("p", 25, 4))
    assert 0.3 < found.whole.mean < 0.7
    assert found.whole.low < 0.6


def test_what_gives_a_box_away_comes_first_with_its_cure() -> None:
    rng = np.random.default_rng(4)
    plain = [{"uptime": float(rng.exponential(1e5)), "umask": 18} for _ in range(60)]
    boxes = [FingerprintSample(f"b{i}", p | {"history": 3, "status.Seccomp": "2"}) for i, p in enumerate(plain[:30])]
    users = [
        FingerprintSample(f"p{i}", p | {"history": 400 + i, "status.Seccomp": "0"}) for i, p in enumerate(plain[30:])
    ]
    found = audit.compare(boxes, users)
    assert {tell.probe for tell in found.tells[:2]} == {"history", "status.Seccomp"}
    assert found.gated.mean > 0.9, "history is no exception"
    first = next(tell for tell in found.tells if tell.probe == "history")
    assert first.cure
    assert not first.exception
    assert next(tell for tell in found.tells if tell.probe == "status.Seccomp").exception
    assert found.telling == 1
    without = audit.compare([FingerprintSample(s.machine, {**s.probes, "history": 400}) for s in boxes],
                            [FingerprintSample(s.machine, {**s.probes, "history": 400}) for s in users])  # fmt: skip
    assert without.gated.mean < 0.75 < without.whole.mean, "declared exceptions stay out of the gate"


def test_every_probe_has_a_cure_and_every_group_an_item() -> None:
    names = fingerprint.sample()
    assert len(names) > 50, "parts of the fingerprint fail here"
    assert all(probes.of(name) is not probes._OTHER for name in names)
    assert {probes.of(name).group for name in names} == {f"E{n}" for n in range(1, 9)}


def test_fingerprints_hold_no_values_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDITOR", "quartz-lantern")
    monkeypatch.setenv("ACME_TOKEN", "velvet-anchor")
    line = fingerprint.line()
    sample = parse_fingerprint(line, "here")
    assert "EDITOR" in sample.probes["environment"]
    assert "quartz-lantern" not in line
    assert "velvet-anchor" not in line
    assert "ACME" not in line
    assert fingerprint.socket.gethostname() not in line


@pytest.mark.parametrize("line", ["", "{", "[]", '{"format": 9, "machine": "a", "probes": {}}', '{"format": 1}'])
def test_files_that_are_no_fingerprints_are_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "f.jsonl"
    path.write_text(line)
    with pytest.raises(UserError):
        read_fingerprints([path])
    with pytest.raises(UserError):
        read_fingerprints([tmp_path / "absent"])
    with pytest.raises(UserError, match="say nothing"):
        audit.compare([], [])


def test_recording_appends_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    audit.record_fingerprints(path, 2)
    audit.record_fingerprints(path, 1)
    samples = read_fingerprints([path])
    assert len(samples) == 3
    assert len({sample.machine for sample in samples}) == 1
    assert table(samples).values_NC.shape[0] == 3
    assert fingerprint.FORMAT == FORMAT, "the script imports nothing of ours"
    for wrong, count in ((tmp_path / "no" / "f", 1), (path, 0)):
        with pytest.raises(UserError):
            audit.record_fingerprints(wrong, count)


LOOK = """
import json, os, pwd, socket
me = pwd.getpwuid(os.getuid())
history = me.pw_dir + '/.bash_history'
def text(path): return open(path).read()
print(json.dumps([
    socket.gethostname(), text('/proc/uptime'), me.pw_name, me.pw_dir, os.getcwd(), len(pwd.getpwall()),
    sorted(os.listdir(me.pw_dir)), text('/proc/cmdline'), dict(os.environ), text('/proc/1/cmdline'),
    text('/proc/1/comm'), os.access('/etc/passwd', os.W_OK),
    text(history).count(chr(10)) if os.path.exists(history) else None, text('/proc/%d/cmdline' % os.getppid()),
]))
"""


def test_a_box_looks_like_its_machine_profile(library_image: Image) -> None:
    seen = {
        "host.shape": "a-a9", "uptime": 200_000.0, "accounts": 41, "history": 120, "home.entries": 9, "path": 7,
        "dotfiles": [".bash_history", ".bashrc", ".ssh", ".vimrc"], "environment": ["PAGER", "EDITOR", "USER", "TERM"],
        "kernel.line": ["BOOT_IMAGE", "quiet", "root"], "terminal.kind": "tmux-256color",
        "pid1.name": "systemd", "pid1.program": "init", "machine_id": 32,
    }  # fmt: skip

    async def look(machine_profiles) -> list:
        async with open_sandbox(machine_profiles=machine_profiles) as sandbox:
            found = []
            for _ in range(2):
                box = await sandbox.create(library_image, Limits())
                done = await box.exec(f'python3 -c "{LOOK}"', 20.0)
                assert done.rc == 0, done.output
                found.append(json.loads(done.output))
                await box.close()
            return found

    (first, second), (plain, _) = asyncio.run(look([seen])), asyncio.run(look(None))
    host, uptime, user, home, folder, accounts, entries, kernel, env, init, comm, writable, history, parent = first
    assert fingerprint.shape(host) == "a-a9"
    assert 0.7 * 200_000 < float(uptime.split()[0]) < 1.3 * 200_000
    assert (home, folder, env["HOME"], env["USER"]) == (f"/home/{user}", "/workspace", f"/home/{user}", user)
    assert accounts == 41
    assert len(entries) == 9
    assert {".bash_history", ".ssh", ".vimrc"} <= set(entries)
    assert history == 120
    assert [word.partition("=")[0] for word in kernel.split()] == ["BOOT_IMAGE", "quiet", "root"]
    assert (env["TERM"], env["PAGER"], env["EDITOR"]) == ("tmux-256color", "less", "vim")
    assert (init, comm.strip(), parent) == ("/sbin/init\0", "systemd", "bash\0")
    assert not {"PYTHONPATH", "PYTHONHASHSEED", "PYTHONDONTWRITEBYTECODE", "LOGNAME"} & env.keys()
    assert not writable
    assert second[0] == host, "the members of a group see one machine"
    assert (plain[0], plain[2]) == ("devbox", "user")


SURVEY = """
import json, os, sys, time
def text(path): return open(path).read()
import dependency
root = os.getcwd()
times = [os.stat(os.path.join(f, n)).st_mtime for f, _, ns in os.walk(root) for n in ns]
print(json.dumps([
    os.path.exists('/etc/machine-id'), text('/proc/1/cmdline'), text('/proc/1/comm'), list(os.get_terminal_size()),
    os.getgroups(), os.getpid(), time.time() - max(times), max(times) - min(times), sorted(os.environ),
    sys.dont_write_bytecode, os.access('/etc/hosts', os.W_OK), os.path.exists('/usr/bin/awk'),
]))
"""


def test_a_box_is_like_its_description(library_image: Image) -> None:
    described = msgspec.structs.replace(
        machine_description.read(machine_description.REFERENCE),
        sizes=((33, 99),),
        checkout_minutes=(30.0, 30.001),
        pids=(700, 701),
        init=("tail", "-f", "/dev/null"),
        environment={"HOSTNAME": "{host}"},
        sometimes=machine_description._Sometimes(),
    )

    async def look() -> list:
        async with open_sandbox(machine_profiles=described) as sandbox:
            box = await sandbox.create(library_image, Limits())
            done = await box.exec(f'python3 -c "{SURVEY}"', 20.0)
            assert done.rc == 0, done.output
            assert await box.changes() == {}, "what was dated anew is no change"
            await box.close()
            return json.loads(done.output)

    machine_id, init, comm, size, groups, pid, age, spread, names, bytecode, writable, awk = asyncio.run(look())
    assert not machine_id
    assert (init, comm.strip()) in (("tail\0-f\0/dev/null\0", "tail"), ("tail -f /dev/null\0", "tail"))
    assert size == [99, 33]
    assert (len(groups) == 1 and groups[0] == 1000) or os.geteuid() != 0
    assert 700 < pid < 800 or pid < 100, "a kernel without CONFIG_CHECKPOINT_RESTORE counts from 1"
    if os.geteuid() != 0 or age > 100:  # a file system without owners mapped keeps its dates
        assert 1700 < age < 1900
        assert spread < 1
    assert set(names) <= {"HOME", "HOSTNAME", "OLDPWD", "PATH", "PWD", "SHLVL", "TERM", "_", "LC_CTYPE"}
    assert bytecode
    assert not writable
    assert awk == os.path.exists("/usr/bin/awk")


def test_descriptions_are_read_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "d.toml"
    whole = machine_description.REFERENCE.read_text()
    for wrong, named in (
        (whole.replace('name = "workspace"', ""), "name"), (whole + "\n[other]\n", "other"), ("[", "describes no"),
        (whole.replace("uptime_hours = [3.0, 700.0]", "uptime_hours = [3.0, 2.0]"), "uptime_hours"),
        (whole.replace("checkout_rate = [500.0, 8000.0]", "checkout_rate = [0.0, 8000.0]"), "checkout_rate"),
        (whole.replace('init = ["sleep", "infinity"]', "init = []"), "init"),
    ):  # fmt: skip
        path.write_text(wrong)
        with pytest.raises(UserError, match=named):
            machine_description.read(path)
    assert machine_profile.load_profiles(machine_description.REFERENCE) == machine_description.read(
        machine_description.REFERENCE
    )


def test_machine_profiles_of_other_tasks_differ_and_every_sample_can_be_imitated() -> None:
    drawn = [machine_profile.draw(str(i).encode()) for i in range(50)]
    assert machine_profile.draw(b"1") == drawn[1]
    assert len({p.host for p in drawn}) > 20
    assert len({round(p.uptime) for p in drawn}) == 50
    assert all(p.host and p.host[0].isalnum() and len(p.host) <= 64 for p in drawn)
    slow = msgspec.structs.replace(machine_description.read(machine_description.REFERENCE), checkout_rate=(5.0, 6.0))
    assert 5 <= machine_profile.draw(b"x", slow).checkout_rate <= 6
    here = machine_profile.draw(b"x", [fingerprint.sample()])
    assert fingerprint.shape(here.host)[:1] == fingerprint.shape(fingerprint.socket.gethostname())[:1]
    assert machine_profile.draw(b"x", [{}]).host, "a fingerprint whose every part failed"


@pytest.mark.slow
def test_boxes_are_told_from_this_machine_and_not_from_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    boxes = asyncio.run(audit.box_samples(40, machine_profiles=()))
    splits = [random.Random(seed).sample(boxes, len(boxes)) for seed in range(8)]
    chance = [audit.compare(split[:20], split[20:]).whole.mean for split in splits]
    # Of two classifiers the better one counts, and twenty against twenty say little: 0.33 to 0.71 were seen, 0.53 on
    # average, which has a standard error of 0.05.
    assert sum(chance) / len(chance) < 0.68, chance
    path = tmp_path / "f.jsonl"
    audit.record_fingerprints(path, 20)
    assert show_parity([path], 10, as_json=True) == 1
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["treated"]["whole"]["auc"] > 0.9, "a kernel is shared, and one machine's habits are peculiar"
    assert found["treated"]["telling"] < found["untreated"]["telling"]
    assert found["notes"]
