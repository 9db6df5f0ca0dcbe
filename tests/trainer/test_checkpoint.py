"""Checkpoints: shards of any number of ranks, digests, what a killed or failed writer leaves, and what stays."""

import os
import shutil
import signal
import subprocess
import sys
import threading

import pytest
import torch

from etude.errors import RunFailed, UserError
from etude.trainer import checkpoint
from etude.trainer.checkpoint import CheckpointWriter
from etude.weights.ranks import Ranks, Shard

ONE = Ranks(0, 1, "one")


def states(seed: int = 0) -> dict[str, torch.Tensor]:
    """Tensors of several types and shapes, one with fewer rows than there are ranks."""
    torch.manual_seed(seed)
    return {
        "master/a": torch.randn(10, 3), "master/b": torch.randn(7), "exp_avg/c": torch.randn(2, 2, 2),
        "bias": torch.randn(5).bfloat16(), "step/a": torch.tensor(7.0),
    }  # fmt: skip


def write(folder, version, tensors, ranks=ONE, about=None):
    checkpoint.write(folder, version, checkpoint.parts_of(tensors, ranks.rank, ranks.count), ranks, about or {})


def same(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[n], two[n]) and one[n].dtype == two[n].dtype for n in one)


@pytest.mark.parametrize("readers", [1, 2, 5])
def test_any_number_of_ranks_loads_what_three_wrote(tmp_path, readers):
    tensors = states()
    ranks = [Ranks(rank, 3, "session") for rank in range(3)]
    writers = [threading.Thread(target=write, args=(tmp_path, 4, tensors, rank)) for rank in ranks]
    for thread in writers:
        thread.start()
    for thread in writers:
        thread.join()
    assert sorted(os.listdir(tmp_path)) == ["step_4"]
    assert sorted(os.listdir(tmp_path / "step_4")) == ["manifest.json", *(f"rank_{n}.safetensors" for n in range(3))]
    sizes = [(tmp_path / f"step_4/rank_{n}.safetensors").stat().st_size for n in range(3)]
    assert max(sizes) < 0.6 * sum(sizes), "each rank writes its part"

    for reader in range(readers):

        def take(name, total, rank=reader):
            return range(total) if name.startswith("step/") else checkpoint.rows_of(total, rank, readers)

        loaded, _ = checkpoint.load(tmp_path, 4, take)
        own = {name: t if not t.ndim else torch.chunk(t, readers)[reader : reader + 1] for name, t in tensors.items()}
        assert same(loaded, {n: t if isinstance(t, torch.Tensor) else t[0] for n, t in own.items() if len_of(t)})


def len_of(part):
    return 1 if isinstance(part, torch.Tensor) else len(part)


def test_a_rank_that_does_not_write_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "RANK_SECONDS", 0.1)
    write(tmp_path, 1, states(), Ranks(1, 3, "session"))
    with pytest.raises(RunFailed, match="rank 2 did not write its file of checkpoint 1"):
        write(tmp_path, 1, states(), Ranks(0, 3, "session"))
    write(tmp_path, 1, states(), Ranks(2, 3, "another"))  # of an attempt that was killed: it does not count
    assert checkpoint.versions(tmp_path) == []
    checkpoint.drop_after(tmp_path, 5)
    assert not list(tmp_path.iterdir())


def test_every_flipped_bit_of_every_file_is_found(tmp_path):
    write(tmp_path, 0, {"exp_avg/a": torch.randn(300), "step/a": torch.ones(())}, about={"elapsed": "1.5"})
    for name in ("rank_0.safetensors", "manifest.json"):
        path = tmp_path / "step_0" / name
        whole = path.read_bytes()
        for place in (0, 7, 8, 20, len(whole) // 2, len(whole) - 1, *range(64, len(whole), 131)):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            with pytest.raises(checkpoint.CheckpointDamaged, match="checkpoint 0 is damaged"):
                checkpoint.load(tmp_path, 0)
        for broken in (b"", whole[:100], whole[:-1], whole + b"\0"):
            path.write_bytes(broken)
            with pytest.raises(checkpoint.CheckpointDamaged, match="checkpoint 0 is damaged"):
                checkpoint.load(tmp_path, 0)
        path.write_bytes(whole)
    tensors, about = checkpoint.load(tmp_path, 0)
    assert (tensors.keys(), about) == ({"exp_avg/a", "step/a"}, {"elapsed": "1.5"})
    (tmp_path / "step_0/rank_0.safetensors").unlink()
    with pytest.raises(checkpoint.CheckpointDamaged, match=r"checkpoint 0 is damaged .* is missing"):
        checkpoint.load(tmp_path, 0)


def test_a_checkpoint_that_lies_under_another_number_is_refused(tmp_path):
    write(tmp_path, 3, states())
    shutil.copytree(tmp_path / "step_3", tmp_path / "step_4")
    with pytest.raises(checkpoint.CheckpointDamaged, match="checkpoint 4 is damaged"):
        checkpoint.load(tmp_path, 4)


def test_the_newest_whole_one_is_taken_and_said(tmp_path, capsys):
    assert checkpoint.load_newest(tmp_path) is None
    for version in (2, 4):
        write(tmp_path, version, states(version))
    path = tmp_path / "step_4/rank_0.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    version, tensors, _ = checkpoint.load_newest(tmp_path)
    assert version == 2
    assert same(tensors, states(2))
    assert "note: checkpoint 4 is damaged" in capsys.readouterr().err
    (tmp_path / "step_2/manifest.json").unlink()
    with pytest.raises(UserError, match=r"checkpoint 4 is damaged .* no older one is whole"):
        checkpoint.load_newest(tmp_path)


def test_rows_that_nobody_or_two_ranks_wrote_are_found(tmp_path):
    whole = Shard(torch.ones(4), 0, 4)
    for number, parts in enumerate(({"a": Shard(torch.ones(3), 0, 4)}, {"a": whole})):
        ranks = [Ranks(rank, 2, "session") for rank in (1, 0)]
        for rank in ranks:
            own = {"a": Shard(torch.ones(2), 2, 4)} if rank.rank and number else {}
            checkpoint.write(tmp_path, number, parts if rank.rank == 0 else own, rank, {})
        with pytest.raises(checkpoint.CheckpointDamaged, match=r"does not have each row of a tensor once"):
            checkpoint.load(tmp_path, number)


KILLED = """
import sys, torch
from pathlib import Path
from etude.trainer import checkpoint
from etude.weights.ranks import Ranks, Shard
for version in (0, 1):
    parts = checkpoint.parts_of({"a": torch.full((1000,), float(version))})
    checkpoint.write(Path(sys.argv[1]), version, parts, Ranks(0, 1, "killed"), {})
"""


def test_a_kill_at_any_place_leaves_the_last_good_one(tmp_path):
    """`complete` is after the name is given; in one process, since every start imports torch."""
    for place in ("file", "manifest", "complete"):
        pid = os.fork()
        if pid == 0:
            os.environ["ETUDE_FAILPOINT"] = f"checkpoint.{place}:2"
            sys.argv = ["x", str(tmp_path / place)]
            exec(KILLED, {})
            os._exit(3)
        assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
        newest = int(place == "complete")
        version, tensors, _ = checkpoint.load_newest(tmp_path / place)
        assert version == newest
        assert torch.equal(tensors["a"], torch.full((1000,), float(newest)))
        write(tmp_path / place, 1, {"a": torch.ones(2)})
        checkpoint.drop_after(tmp_path / place, 1)
        assert sorted(os.listdir(tmp_path / place)) == ["step_0", "step_1"]


# --- the writer -----------------------------------------------------------------------------------------------------


def test_tensors_of_the_host_are_written_from_where_they_are_and_only_one_checkpoint_is_on_its_way(
    tmp_path, monkeypatch
):
    tensors, going, begun = states(), threading.Event(), []
    write_now = checkpoint.write

    def slow(folder, version, parts, *rest):
        begun.append(version)
        assert all(parts[name].rows.data_ptr() == tensor.data_ptr() for name, tensor in tensors.items())
        assert going.wait(30)
        write_now(folder, version, parts, *rest)

    monkeypatch.setattr(checkpoint, "write", slow)
    writer = CheckpointWriter(tmp_path, keep=2)
    writer.start(1, checkpoint.parts_of(tensors))
    threading.Timer(0.3, going.set).start()
    writer.wait()
    for tensor in tensors.values():
        tensor.zero_()  # the next step
    writer.start(2, checkpoint.parts_of(tensors))
    assert begun[0] == 1
    assert same(checkpoint.load(tmp_path, 1)[0], states()), "the second begins when the first is whole"
    writer.close()
    assert same(checkpoint.load(tmp_path, 2)[0], tensors)
    assert not any(t.any() for t in tensors.values())


def test_the_seconds_of_waiting_are_told(tmp_path, monkeypatch):
    going = threading.Event()
    monkeypatch.setattr(checkpoint, "write", lambda *_: going.wait(30))
    writer = CheckpointWriter(tmp_path, keep=2)
    assert writer.wait() < 0.2
    writer.start(1, checkpoint.parts_of(states()))
    threading.Timer(0.3, going.set).start()
    assert 0.2 < writer.wait() < 30


def test_the_newest_and_the_protected_stay(tmp_path):
    writer = CheckpointWriter(tmp_path, keep=2)
    for version in range(5):
        writer.start(version, checkpoint.parts_of(states(version)), protect={1})
    writer.close()
    assert checkpoint.versions(tmp_path) == [1, 3, 4]
    assert sorted(os.listdir(tmp_path)) == ["step_1", "step_3", "step_4"]


def test_a_full_disk_is_said_the_run_goes_on_and_ends_if_it_stays_full(tmp_path, capsys):
    """A folder that cannot be made stands for the disk: the error is the system's own in both cases."""
    folder = tmp_path / "checkpoints"
    writer = CheckpointWriter(folder, keep=2)
    writer.start(1, checkpoint.parts_of(states()))
    writer.wait()
    folder.rename(tmp_path / "away")
    folder.write_text("not a folder")
    writer.start(2, checkpoint.parts_of(states()))
    writer.wait()
    assert writer.failed
    said = capsys.readouterr().err
    assert "note: checkpoint 2 cannot be written to" in said
    assert "it takes 0.0 MB beside those that are kept; the run goes on and tries again" in said
    folder.unlink()
    (tmp_path / "away").rename(folder)
    writer.start(3, checkpoint.parts_of(states()))
    writer.close()
    assert checkpoint.versions(folder) == [1, 3]
    shutil.rmtree(folder)
    folder.write_text("not a folder")
    for version in (4, 5):
        writer.start(version, checkpoint.parts_of(states()))
    writer.wait()
    with pytest.raises(UserError, match="checkpoint 5 cannot be written to"):
        writer.start(6, checkpoint.parts_of(states()))
    with pytest.raises(UserError, match="checkpoint 5 cannot be written to"):
        writer.close()


@pytest.mark.slow
def test_a_disk_that_is_really_full(tmp_path):
    """In a process of its own whose files may not grow beyond 64 KiB."""
    code = """
import resource, signal, sys, torch
from pathlib import Path
from etude.trainer import checkpoint
from etude.weights.ranks import Ranks, Shard
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
parts = checkpoint.parts_of({"a": torch.ones(100_000)})
try:
    checkpoint.write(Path(sys.argv[1]), 1, parts, Ranks(0, 1, "x"), {})
except Exception as e:
    print(type(e).__name__, e)
"""
    said = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert said.stdout.startswith("UserError checkpoint 1 cannot be written to"), said
    assert "0.4 MB" in said.stdout
    assert not list(tmp_path.iterdir())


def test_a_rank_that_cannot_write_ends_the_checkpoint_of_all_at_once(tmp_path, monkeypatch):
    ranks = [Ranks(rank, 2, "session") for rank in range(2)]

    def full(tensors, file):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", full)
        with pytest.raises(UserError, match=r"checkpoint 1 cannot be written to .*: No space left on device"):
            checkpoint.write(tmp_path, 1, {"a": Shard(torch.ones(2), 2, 4)}, ranks[1], {})
    with pytest.raises(UserError, match="checkpoint 1 cannot be written: rank 1 could not; see its log"):
        checkpoint.write(tmp_path, 1, {"a": Shard(torch.ones(2), 0, 4)}, ranks[0], {})
    assert checkpoint.versions(tmp_path) == []
