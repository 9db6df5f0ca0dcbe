"""The stages on several ranks, against one process: losses, written folders, resumes on another number of ranks.

Four ranks start once and compute all cases: of two ranks on ranks 0 and 1, while rank 2 computes those of one process.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError
from safetensors.torch import load_file

from etude.config import MeshConfig
from etude.corpus import pack_rows
from etude.errors import UserError
from etude.trainer.finetune import applied_edits, pretrain
from etude.trainer.finetune.config import ApplyConfig, MidtrainConfig, OptimConfig, SftConfig
from etude.trainer.finetune.folder import load
from etude.trainer.finetune.packed import PackedSteps
from etude.trainer.finetune.passes import shares
from etude.trainer.world import World
from tests.helpers import apply_edits, forked_ranks
from tests.helpers.folders import write_folder
from tests.helpers.ranks import free_port
from tests.trainer.test_folder_stages import chat

LOSS = 1e-5  # float32 sums in another order
STAGES = {"midtrain": pretrain.midtrain, "sft": pretrain.sft, "apply": applied_edits.finetune}
KINDS = {"midtrain": MidtrainConfig, "sft": SftConfig, "apply": ApplyConfig}


@dataclass(frozen=True)
class Case:
    """A stage on a mesh; `like` names that of one process with equal results. With `then` the run is stopped after
    three steps, and resumed on that mesh."""

    stage: str
    like: str = ""
    mesh: dict[str, int] = field(default_factory=dict)
    model: str = "moe"
    trainer: dict[str, Any] = field(default_factory=dict)
    teacher: str = ""
    then: dict[str, int] | None = None

    @property
    def ranks(self) -> int:
        return max(MeshConfig(**mesh).ranks for mesh in (self.mesh, self.then or {}))


DENSE = {"batch": 3}  # three passes: one of two ranks has an idle one
APPLY = {"length": 256, "tokens": 5120}
LORA = {"lora": {"rank": 4, "targets": ["q_proj", "experts.gate_up_proj", "experts.down_proj"]}, "lr": 1e-3}
NARROW, NONE, CROSSING = {"dtype": "bfloat16"}, {"packing": "none"}, {"packing": "crossing"}
CASES = {
    "moe": Case("midtrain"),
    "expert": Case("midtrain", "moe", {"shard": 2, "expert": 2}),
    "context": Case("midtrain", "moe", {"context": 2}),
    "to one": Case("midtrain", "moe", {"shard": 2}, then={}),
}
MORE = {
    "moe": CASES["moe"],
    "dense": Case("sft", model="dense", trainer=DENSE),
    "apply": Case("apply", trainer=APPLY),
    "replicate": Case("midtrain", "moe", {"replicate": 2}),
    "four": Case("midtrain", "moe", {"replicate": 2, "shard": 2, "expert": 2}),
    "shard apply": Case("apply", "apply", {"shard": 2}, trainer=APPLY),
    "from one": Case("sft", "dense", {}, "dense", DENSE, then={"shard": 2}),
    "new": Case("apply", model="new", trainer=APPLY, teacher="moe"),
    "distill": Case("sft", model="dense", teacher="dense"),
    "none": Case("midtrain", trainer=NONE),
    "crossing": Case("sft", model="dense", trainer=CROSSING),
    "bfloat16": Case("midtrain", trainer=NARROW),
    "lora": Case("midtrain", trainer=LORA),
    "shard lora": Case("midtrain", "lora", {"shard": 2}, trainer=LORA),
    "expert lora": Case("midtrain", "lora", {"shard": 2, "expert": 2}, trainer=LORA),
    "shard": Case("sft", "dense", {"shard": 2}, "dense", DENSE),
    "context dense": Case("sft", "dense", {"context": 2}, "dense", DENSE),
    "shard new": Case("apply", "new", {"shard": 2, "expert": 2}, "new", APPLY, "moe"),
    "shard distill": Case("sft", "distill", {"shard": 2}, "dense", teacher="dense"),
    "context distill": Case("sft", "distill", {"context": 2}, "dense", teacher="dense"),
    "shard none": Case("midtrain", "none", {"shard": 2, "expert": 2}, trainer=NONE),
    "shard crossing": Case("sft", "crossing", {"shard": 2}, "dense", CROSSING),
    "shard bfloat16": Case("midtrain", "bfloat16", {"shard": 2}, trainer=NARROW),
    "replicate bfloat16": Case("midtrain", "bfloat16", {"replicate": 2}, trainer=NARROW),
    "four with context": Case("midtrain", "moe", {"shard": 2, "context": 2, "expert": 2}),
    "four to two": Case("midtrain", "moe", {"replicate": 2, "shard": 2}, then={"shard": 2, "expert": 2}),
}


def folders(root: Path) -> None:
    """The models and the files of all cases."""
    apply_edits.fill(root)
    write_folder(root / "dense", "qwen3", 1300, torch.float32)
    (root / "model").rename(root / "moe")
    texts = [json.dumps({"text": " ".join(f"{word}{i} = {i * i};" for i in range(9 + n % 7))}) for n, word in
             enumerate("abcdefghijklmnopqrstuvwxyz" * 3)]  # fmt: skip
    (root / "texts.jsonl").write_text("\n".join(texts))
    (root / "chats.jsonl").write_text("\n".join(json.dumps(chat(i)) for i in range(40)))


def config(root: Path, case: Case, mesh: dict[str, int]) -> Any:
    """The configuration of a case: five or six steps of four rows, one row a pass, in float32 by default."""
    trainer = {"batch": 4, "micro_batch": 1, "length": 192, "lr": 1e-5, "warmup": 0.0, "threads": 1, "log_every": 1}
    trainer |= {"dtype": "float32", "collective_seconds": 60, "mesh": mesh, "tokens": 3600} | case.trainer
    values: dict[str, Any] = {"seed": 3, "trainer": trainer}
    if case.model != "new":
        values["model"] = {"path": root / case.model}
    else:
        values["model"] = apply_edits.MODEL.model_dump()
    if case.stage == "apply":
        values |= {"data": root / "train.parquet", "held_out": root / "heldout.parquet", "measured": 5}
        values |= {"phases": ({"share": 1.0, "longest": 256},)}
    else:
        file = root / ("texts.jsonl" if case.stage == "midtrain" else "chats.jsonl")
        values["data"] = {"files": [file], "held_out": [file]}
    if case.teacher:
        values["distill"] = {"teacher": root / case.teacher}
    return KINDS[case.stage].model_validate(values)


def compute(root: Path, cases: dict[str, Case]) -> str:
    """Each rank's part of the cases. Returns why two ranks do not train on files without a row."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    groups = {0: (4, 2), 1: (4, 2), 2: (4, 1), 3: (4,)}[rank]
    for ranks in groups:
        for name, case in cases.items():
            if case.ranks == ranks:
                one_case(root, name, case, rank % 2 if ranks == 2 else 0 if ranks == 1 else rank)
    if rank > 1:
        return ""
    (root / "chats.jsonl").write_text("{}")
    with pytest.raises(UserError) as refusal:
        stage(root, Case("sft", model="dense"), {"shard": 2}, root / "outputs" / "no rows", rank)
    return f"{refusal.value} {sorted(file.name for file in (root / 'outputs' / 'no rows').iterdir())}"


def one_case(root: Path, name: str, case: Case, rank: int) -> None:
    output = root / "outputs" / name
    if case.then is None:
        stage(root, case, case.mesh, output, rank)
        return
    for number, mesh in enumerate((case.mesh, case.then)):
        options = {"resume": True} if number else {"stop_after": 3}
        if number:
            appeared(root / f"{name} stopped")
        stage(root, case, mesh, output, rank, **options)
        if rank == 0:
            (root / f"{name} stopped").touch()


def appeared(file: Path) -> Path:
    """A file that another rank makes."""
    until = time.monotonic() + forked_ranks.SECONDS
    while not file.exists():
        assert time.monotonic() < until, file
        time.sleep(0.01)
    return file


def stage(root: Path, case: Case, mesh: dict[str, int], output: Path, rank: int, **options: Any) -> None:
    count = MeshConfig(**mesh).ranks
    if rank >= count:
        return
    place = output.with_name(f"{output.name} {sorted(options)} port")
    if rank == 0:  # only now: a port that is chosen long before may be somebody else's by then
        output.parent.mkdir(exist_ok=True)
        place.with_suffix(".part").write_text(str(free_port()))
        place.with_suffix(".part").rename(place)
    port = appeared(place).read_text()
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in own.items()})
    torch.manual_seed(0)
    STAGES[case.stage](config(root, case, mesh), output, **options)


def computed(root: Path, cases: dict[str, Case]) -> Path:
    """The run folders of the cases."""
    folders(root)
    refusals = forked_ranks.run(compute, 4, root, cases)
    (root / "outputs" / "refusals.json").write_text(json.dumps(refusals))
    return root / "outputs"


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return computed(tmp_path_factory.mktemp("stages"), CASES)


@pytest.fixture(scope="module")
def more(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return computed(tmp_path_factory.mktemp("more"), MORE)


def lines(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.like])
def test_ranks_train_as_one_process(outputs: Path, name: str) -> None:
    check(outputs, name, CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, case in MORE.items() if case.like])
def test_more_options_train_as_one_process(more: Path, name: str) -> None:
    check(more, name, MORE[name])


def test_what_rank_0_refuses_is_refused_by_all(outputs: Path) -> None:
    one, two, *_ = json.loads((outputs / "refusals.json").read_text())
    assert one == two
    assert "no row of data.files can be learned from" in one
    assert "['data.json']" in one, "no configuration, so that the run can start again"


def check(outputs: Path, name: str, case: Case) -> None:
    """The same lines of metrics, and the same folder."""
    ours, theirs = outputs / name, outputs / case.like
    rounded = "bfloat16" in name
    one, two = lines(ours), lines(theirs)
    if case.then is not None:  # the stopped run wrote a checkpoint
        one = [line for line in one if "loss/token" in line or line["step"] == two[-1]["step"]]
    assert [line["step"] for line in one] == [line["step"] for line in two]
    assert len(two) >= 6
    for a, b in zip(one, two, strict=True):
        assert a.keys() == b.keys()
        for key in a.keys() - {"time", "perf/tokens_per_s"}:
            assert a[key] == pytest.approx(b[key], rel=5e-2 if rounded else 1e-4, abs=LOSS), key
        if "loss/token" in a:
            assert a["loss/token"] == pytest.approx(b["loss/token"], abs=2e-2 if rounded else LOSS)
    same_folders(ours / "checkpoint", theirs / "checkpoint", 1e-1 if rounded else 1e-4)


def same_folders(ours: Path, theirs: Path, share: float) -> None:
    """At most a `share` of the elements differs, by a rounding in bfloat16, or 1e-6 in float32."""
    names = sorted(file.name for file in theirs.iterdir())
    assert sorted(file.name for file in ours.iterdir()) == names
    for file in names:
        if not file.endswith("safetensors"):
            assert (ours / file).read_bytes() == (theirs / file).read_bytes(), file
    one, two = (load_file(folder / "model.safetensors") for folder in (ours, theirs))
    assert one.keys() == two.keys()
    total = other = 0
    for name, tensor in one.items():
        assert tensor.dtype == two[name].dtype
        assert tensor.shape == two[name].shape
        total += tensor.numel()
        if tensor.dtype == torch.bfloat16:
            apart = (tensor.view(torch.int16).int() - two[name].view(torch.int16).int()).abs()
            tiny = (tensor.float() - two[name].float()).abs() < 1e-5
            assert bool(((apart <= 1) | tiny).all()), name
            other += int((apart > 0).sum())
        else:
            other += int(((tensor - two[name]).abs() > 1e-6).sum())
    assert other <= share * total


def test_passes_of_about_equal_sizes_run_together() -> None:
    assert shares((5, 9, 2, 8), 1) == [[1, 3, 0, 2]]
    assert shares((5, 9, 2, 8), 2) == [[1, 2], [3, 0]]
    assert shares((5, 9, 2), 2) == [[1, None], [0, 2]]
    assert shares((3,), 3) == [[0], [None], [None]]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"mesh": {"shard": 2}, "compile": True, "packing": "crossing"}, "trainer.compile is for one rank"),
        ({"mesh": {"context": 2}, "packing": "crossing"}, 'drop trainer.packing = "crossing"'),
        ({"mesh": {"context": 2}, "packing": "none"}, 'drop trainer.packing = "none"'),
        ({"mesh": {"shard": 2, "expert": 4}}, "must divide shard x context = 2"),
    ],
)
def test_options_that_ranks_cannot_compute_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        OptimConfig(**options)


def test_what_needs_one_rank_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    values = {"model": {"path": tmp_path}, "documents": {"repositories": [tmp_path]}}
    with pytest.raises(ValidationError, match=r"for one rank: drop trainer\.mesh"):
        SftConfig.model_validate(values | {"trainer": {"mesh": {"replicate": 2}}})
    folders(tmp_path)
    case = Case("sft", model="dense")
    with pytest.raises(UserError, match="needs 2 ranks, and this process is one of 1"):
        pretrain.sft(config(tmp_path, case, {"shard": 2}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_model_whose_rows_ranks_cannot_compute_together_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    model, optim = write_folder(tmp_path / "next", "qwen3_next", 1300), OptimConfig(mesh={"context": 2}, length=64)
    with pytest.raises(UserError, match=r"set trainer\.mesh\.context to 1"):
        load(model, optim, World(0, optim.mesh))


def test_by_default_a_pass_has_the_rows_of_a_data_rank() -> None:
    rows = pack_rows([(np.arange(2, 10, dtype=np.uint32), np.ones(8, np.uint8))] * 6, 8, pad=0, separator=None)
    for mesh, passes in (({}, 1), ({"replicate": 2}, 2), ({"shard": 2, "context": 2}, 2), ({"shard": 4}, 3)):
        step = PackedSteps.of(rows, OptimConfig(batch=6, length=16, mesh=MeshConfig(**mesh)), "isolated", 0)[0]
        assert len(step) == passes
