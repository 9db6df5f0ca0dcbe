"""A live loop with a served model, and windows of answers that the engine really sampled."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import sqlalchemy as sa
import torch

from etude.audit.rescoring import set_weights
from etude.config import LiveConfig
from etude.inference.engine.engine import Engine
from etude.inference.engine.requests import Request
from etude.live.log import schema
from etude.live.log.records import LiveSample, VersionSpan
from etude.models.loading import load_model, named_tensors
from etude.renderers import renderer_for
from etude.store import Store, open_store
from etude.weights.content import load
from etude.weights.manifest import newest_manifest
from etude.weights.publisher import Publisher
from tests.helpers.tiny_models import save_random_model
from tests.helpers.trainer_runs import sampled

NANO = Path(__file__).parents[2] / "models/nano"
RECIPE = """
deterministic = {deterministic}

[model]
path = "{model}"

[tasks]
repository = "unused"

[rollout]
staleness = {staleness}
tokens = 32
context = 256

[trainer]
lr = {lr}
warmup_steps = 0

{more}
"""


@dataclass(frozen=True)
class Loop:
    """A loop of one cluster, whose control serves the newest version of its store."""

    config: LiveConfig
    log: sa.Engine
    model: Path

    @property
    def control(self) -> Store:
        return open_store(self.config.clusters[0].store)

    @property
    def candidates(self) -> Store:
        return open_store(str(Path(self.config.folder) / "train/weights"))


def new_loop(
    root: Path, *, model: Path | None = None, deterministic: bool = False, lr: float = 3e-3, more: str = ""
) -> Loop:
    """A loop that serves `model` as version 0 of its control; by default a small random one with nano's tokenizer."""
    root.mkdir(parents=True, exist_ok=True)
    if model is None:
        model = save_random_model(root / "model", "qwen3", num_hidden_layers=2, vocab_size=4096)
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(NANO / name, model / name)
    text = RECIPE.format(
        deterministic=str(deterministic).lower(), model=model, lr=lr, more=more, staleness=0 if deterministic else 1
    )
    (root / "recipe.toml").write_text(text)
    cluster = {"name": "one", "urls": ["http://127.0.0.1:1"], "store": str(root / "control")}
    config = LiveConfig.model_validate(
        {"folder": str(root / "live"), "train": str(root / "recipe.toml"), "clusters": [cluster]}
    )
    (root / "live").mkdir(mode=0o700)
    loop = Loop(config, schema.connect(f"sqlite:///{root}/live/live.db"), model)
    release(loop, {name: t.to(torch.bfloat16) for name, t in named_tensors(load_model(str(model))).items()})
    return loop


def release(loop: Loop, tensors: dict[str, torch.Tensor]) -> None:
    """The control serves these weights from now on."""
    publisher, last = Publisher(loop.control), newest_manifest(loop.control)
    if last is not None:
        publisher.resume(last, load(loop.control, last.version)[1])
    publisher.publish(0 if last is None else last.version + 1, tensors, (), {})
    publisher.finish_anchor()


def begin_window(loop: Loop, number: int) -> None:
    """The row of a window in the log."""
    row = {"number": number, "cut": number, "rules": "", "batch": "", "run": "", "base_version": 0, "at": number}
    with loop.log.begin() as c:
        c.execute(sa.insert(schema.windows), [row])


def window(loop: Loop, number: int) -> Any:
    with loop.log.begin() as c:
        return c.execute(sa.select(schema.windows).where(schema.windows.c.number == number)).one()


def exits(loop: Loop, number: int) -> dict[str, tuple[str, str]]:
    """Kind and reason of the exit of each turn that has one."""
    with loop.log.begin() as c:
        rows = c.execute(sa.select(schema.exits).where(schema.exits.c.window == number)).all()
    return {row.turn: (row.kind, row.reason) for row in rows}


def answered(
    loop: Loop, number: int, count: int, *, content: str = "Rename `f` to `g` in a.py", tokens: int = 8
) -> list[LiveSample]:
    """So many answers of what the control serves; every second user keeps the answer."""
    begin_window(loop, number)
    now = newest_manifest(loop.control)
    assert now is not None
    engine = engine_of_loop(loop, now.version)
    renderer = renderer_for(loop.model)
    prompts = [renderer.prompt([{"role": "user", "content": f"{content}, {i}"}]) for i in range(count)]
    answers = sampled(
        engine, [Request(ids=ids, max_tokens=tokens, seed=1000 * number + i) for i, ids in enumerate(prompts)]
    )
    return [
        LiveSample(
            turn=f"TURN{number:04d}{i:04d}",
            account=f"a{i}",
            cluster="one",
            manifest=now.live,
            prompt_ids=np.array(ids, "<i4").tobytes(),
            ids=np.array(a.ids, "<i4").tobytes(),
            logprobs=np.array(a.logprobs, "<f4").tobytes(),
            temperature=1.0,
            top_p=1.0,
            spans=(VersionSpan(low=0, high=len(a.ids), version=now.version),),
            reward=1.0 - 2 * (i % 2),
            advantage=1.0 - 2 * (i % 2),
            weight=1.0,
            correction=None,
        )
        for i, (ids, a) in enumerate(zip(prompts, answers, strict=True))
    ]


def engine_of_loop(loop: Loop, version: int) -> Engine:
    """An engine that serves a version of the control."""
    model = load_model(str(loop.model))
    set_weights(model, load(loop.control, version)[1])
    return Engine(model, version=version)
