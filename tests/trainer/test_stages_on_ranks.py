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

import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError
from safetensors.torch import load_file

from etude.config import MeshConfig
from etude.corpus import build
from etude.corpus.filters import function_texts
from etude.corpus.sources import File
from etude.errors import UserError
from etude.trainer.finetune import applied_edits, pretrain
from etude.trainer.finetune.config import ApplyConfig, MidtrainConfig, OptimConfig, SftConfig
from etude.trainer.finetune.passes import shares
from etude.trainer.world import free_port
from tests.helpers import apply_edits, forked_ranks
from tests.helpers.folders import write_folder
from tests.trainer.test_folder_stages import chat
from tests.trainer.test_pretrain import CODE, MODEL

LOSS = 1e-5  # float32 sums in another order
STAGES = {"midtrain": pretrain.midtrain, "sft": pretrain.sft, "apply": applied_edits.finetune}
KINDS = {"midtrain": MidtrainConfig, "sft": SftConfig, "apply": ApplyConfig}


@dataclass(frozen=True)
class Case:
    """A stage on a mesh; `like` names that of one process with equal results. `stops` has the meshes of a run that is
    stopped after three steps and resumed."""

    stage: str
    like: str = ""
    mesh: dict[str, int] = field(default_factory=dict)
    model: str = "moe"
    trainer: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    then: dict[str, int] | None = None  # the mesh of the resumed run

    @property
    def ranks(self) -> int:
        return max(MeshConfig(**mesh).ranks for mesh in (self.mesh, self.then or {}))


DISTILL = {"distill": {"teacher": "dense", "share": 0.5}}
NONE = {"packing": "none"}
CASES = {
    "moe": Case("midtrain"),
    "dense": Case("sft", model="dense"),
    "new": Case("midtrain", model="new", trainer={"length": 128, "tokens": 2500}),
    "apply": Case("apply", trainer={"length": 256, "tokens": 5120}),
    "distill": Case("sft", model="dense", more=DISTILL),
    "none": Case("midtrain", trainer=NONE),
    "crossing": Case("sft", model="dense", trainer={"packing": "crossing"}),
    "bfloat16": Case("midtrain", trainer={"dtype": "bfloat16"}),
    "shard": Case("sft", "dense", {"shard": 2}, "dense"),
    "replicate": Case("midtrain", "moe", {"replicate": 2}),
    "expert": Case("midtrain", "moe", {"shard": 2, "expert": 2}),
    "context": Case("midtrain", "moe", {"context": 2}),
    "context dense": Case("sft", "dense", {"context": 2}, "dense"),
    "shard new": Case("midtrain", "new", {"shard": 2, "expert": 2}, "new", {"length": 128, "tokens": 2500}),
    "shard apply": Case("apply", "apply", {"shard": 2}, trainer={"length": 256, "tokens": 5120}),
    "shard distill": Case("sft", "distill", {"shard": 2}, "dense", more=DISTILL),
    "shard none": Case("midtrain", "none", {"shard": 2, "expert": 2}, trainer=NONE),
    "shard crossing": Case("sft", "crossing", {"shard": 2}, "dense", {"packing": "crossing"}),
    "shard bfloat16": Case("midtrain", "bfloat16", {"shard": 2}, trainer={"dtype": "bfloat16"}),
    "replicate bfloat16": Case("midtrain", "bfloat16", {"replicate": 2}, trainer={"dtype": "bfloat16"}),
    "to one": Case("midtrain", "moe", {"shard": 2}, then={}),
    "from one": Case("sft", "dense", {}, "dense", then={"shard": 2}),
    "four": Case("midtrain", "moe", {"replicate": 2, "shard": 2, "expert": 2}),
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
        values["model"] = MODEL.model_dump()
    if case.stage == "apply":
        values |= {"data": root / "train.parquet", "held_out": root / "heldout.parquet", "measured": 5}
        values |= {"phases": ({"share": 1.0, "longest": 256},)}
    elif case.model != "new":
        file = root / ("texts.jsonl" if case.stage == "midtrain" else "chats.jsonl")
        values["data"] = {"files": [file], "held_out": [file]}
    if "distill" in case.more:
        values["distill"] = case.more["distill"] | {"teacher": root / case.more["distill"]["teacher"]}
    return KINDS[case.stage].model_validate(values)


def compute(root: Path, ports: dict[str, int]) -> None:
    """Each rank's part of every case."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    texts = tuple(function_texts(File("demo", "demo/sums.py", CODE)))
    build.build_corpus = lambda *args, **kwargs: build.Corpus(texts[:-4], (), {})
    groups = {0: (4, 2), 1: (4, 2), 2: (4, 1), 3: (4,)}[rank]
    for ranks in groups:
        for name, case in CASES.items():
            if case.ranks == ranks:
                one_case(root, name, case, rank % 2 if ranks == 2 else 0 if ranks == 1 else rank, ports)


def one_case(root: Path, name: str, case: Case, rank: int, ports: dict[str, int]) -> None:
    output = root / "outputs" / name
    if case.then is None:
        stage(root, case, case.mesh, output, rank, ports[name])
        return
    for number, mesh in enumerate((case.mesh, case.then)):
        options = {"resume": True} if number else {"stop_after": 3}
        if number:
            until = time.monotonic() + 60
            while not (root / f"{name} stopped").exists():
                assert time.monotonic() < until
                time.sleep(0.01)
        stage(root, case, mesh, output, rank, ports[f"{name} {number}"], **options)
        if rank == 0:
            (root / f"{name} stopped").touch()


def stage(root: Path, case: Case, mesh: dict[str, int], output: Path, rank: int, port: int, **options: Any) -> None:
    count = MeshConfig(**mesh).ranks
    if rank >= count:
        return
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in own.items()})
    torch.manual_seed(0)
    STAGES[case.stage](config(root, case, mesh), output, **options)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("stages")
    folders(root)
    names = [name for case in CASES for name in (case, f"{case} 0", f"{case} 1")]
    forked_ranks.run(compute, 4, root, {name: free_port() for name in names})
    return root / "outputs"


def lines(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.like])
def test_ranks_train_as_one_process(outputs: Path, name: str) -> None:
    case = CASES[name]
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
