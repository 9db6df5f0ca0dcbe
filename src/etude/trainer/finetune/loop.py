"""The loop of the stages before reinforcement learning: batches in order, a schedule, checkpoints, and `resume`.

Weights and gradients are bfloat16; AdamW (Loshchilov & Hutter 2019) keeps float32 master weights and copies them down
after each step, because updates smaller than a bfloat16 rounding step would otherwise be lost.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from etude.errors import UserError
from etude.trainer.finetune.config import OptimConfig
from etude.trainer.optimizer import AdamWSettings, MasterAdamW

log = logging.getLogger(__name__)

Loss = tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]
"""(loss, router balance, expert load [L, E], parts of the loss by the name of their metric)."""


@dataclass(frozen=True)
class TrainingWork:
    """What a stage trains on: `batches[i]` are the arguments of `compute`, each of `tokens` tokens; `evaluate` gives
    the figures of a checkpoint."""

    batches: Sequence[tuple[Any, ...]]
    tokens: int
    compute: Callable[..., Loss]
    evaluate: Callable[[], dict[str, float]]


@dataclass(frozen=True)
class StageRun:
    """Where a stage writes, the folder of its tokenizer, and which part of it runs. `resume` continues from the saved
    state; `stop_after` ends after that many steps in all, with the state saved and the schedule unfinished, as a
    preempted run would."""

    output: Path
    tokenizer: Path
    resume: bool = False
    stop_after: int | None = None


def optimizer_of(model: PreTrainedModel, config: OptimConfig) -> MasterAdamW:
    """AdamW over float32 masters of the trained parameters. Matrices decay, vectors (norms) do not."""
    live = {name: p for name, p in model.named_parameters() if p.requires_grad}
    settings = AdamWSettings(config.betas, config.weight_decay, config.clip, "paper", decay_vectors=False)
    return MasterAdamW(live, settings)


def learning_rate(config: OptimConfig, progress: float) -> float:
    """Warm-up, plateau, linear decay to zero; `progress` in [0, 1]."""
    rise = min(1.0, progress / config.warmup) if config.warmup > 0 else 1.0
    fall = min(1.0, max(0.0, 1.0 - progress) / config.decay)
    # The first step has progress 0 and would otherwise be wasted.
    return config.lr * min(max(rise, 0.02), fall)


def fit(model: PreTrainedModel, work: TrainingWork, config: OptimConfig, run: StageRun) -> PreTrainedModel:
    """Trains on all batches once, in order, or until the token target or the time budget is reached. Writes
    output/metrics.jsonl, output/checkpoint (a Hugging Face folder) and output/state.safetensors (for resuming). Returns
    the model in evaluation mode. Raises UserError if a gradient is not finite."""
    output = run.output
    torch.set_num_threads(config.threads)
    model.train()
    optimizer = optimizer_of(model, config)
    steps, elapsed = _load_state(output, optimizer) if run.resume else (0, 0.0)
    record = _TrainingRecord(output / "metrics.jsonl", work.tokens, steps, elapsed)
    wanted, minutes = min(config.tokens, len(work.batches) * work.tokens), config.max_minutes or math.inf

    def checkpoint() -> None:
        elapsed = record.elapsed()
        model.eval()
        record.write({"step": steps, "time": elapsed} | work.evaluate())
        model.train()
        _save_checkpoint(output, model, run.tokenizer)
        metadata = {"steps": str(steps), "elapsed": str(elapsed)}
        save_file(optimizer.state(), output / "state.incomplete", metadata=metadata)
        (output / "state.incomplete").rename(output / "state.safetensors")

    while steps < len(work.batches) and steps != run.stop_after:
        progress = max(steps * work.tokens / wanted, record.elapsed() / 60 / minutes)
        if progress >= 1:
            break
        lr = learning_rate(config, progress)
        figures = _step(work.compute(*work.batches[steps]), optimizer, lr, config.router_aux)
        steps += 1
        if not math.isfinite(figures["optim/grad_norm"]):
            raise UserError(f"the gradient is not finite at step {steps}; lower optim.lr")
        if steps % config.log_every == 0 or steps == 1:
            record.step(steps, figures)
        if record.checkpoint_due(config.checkpoint_minutes):
            checkpoint()
    checkpoint()
    return model.eval()


def _step(result: Loss, optimizer: MasterAdamW, lr: float, router_aux: float) -> dict[str, Any]:
    """Backward and update, which is left out if the gradient is not finite; figures, as tensors where they are ones."""
    loss, balance, load_LE, parts = result
    (loss + router_aux * balance).backward()
    norm = optimizer.collect()
    if math.isfinite(norm):
        optimizer.apply(lr)
    return {
        "loss/token": loss.detach(),
        **parts,
        "loss/aux": balance.detach(),
        "optim/lr": lr,
        "optim/grad_norm": norm,
        "router/load_min": load_LE.min() if load_LE.numel() else 0.0,
        "router/load_max": load_LE.max() if load_LE.numel() else 0.0,
    }


class _TrainingRecord:
    """The clock of a run and its metrics.jsonl; `elapsed` seconds and `steps` lie behind it already."""

    def __init__(self, path: Path, tokens: int, steps: int, elapsed: float) -> None:
        self._path, self._tokens = path, tokens
        self._started = time.monotonic() - elapsed
        self._saved = self._logged = time.monotonic()
        self._steps = steps  # when the last line was written

    def elapsed(self) -> float:
        """Seconds of the run, those before a resume included."""
        return time.monotonic() - self._started

    def checkpoint_due(self, minutes: float) -> bool:
        """Whether the last checkpoint is older than `minutes`; if so, counts from now on."""
        due = time.monotonic() - self._saved > 60 * minutes
        if due:
            self._saved = time.monotonic()
        return due

    def step(self, steps: int, figures: dict[str, Any]) -> None:
        """Writes the line of a step."""
        now = time.monotonic()
        speed = (steps - self._steps) * self._tokens / (now - self._logged)
        line = {"step": steps, "time": round(now - self._started, 2), "tokens": steps * self._tokens}
        self.write(line | {name: float(value) for name, value in figures.items()} | {"perf/tokens_per_s": speed})
        self._logged, self._steps = now, steps

    def write(self, line: dict[str, float]) -> None:
        """Appends a line to the metrics and to the log."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        log.info("%s", {name: round(value, 4) for name, value in line.items()})


def _save_checkpoint(output: Path, model: PreTrainedModel, tokenizer_dir: Path) -> None:
    """Replaces output/checkpoint by the current model; a reader never sees half of one."""
    partial, final = output / "checkpoint.incomplete", output / "checkpoint"
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    for file in tokenizer_dir.iterdir():
        if file.name.startswith(("tokenizer", "chat_template", "special_tokens")):
            shutil.copy(file, partial / file.name)
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)


def _load_state(output: Path, optimizer: MasterAdamW) -> tuple[int, float]:
    """Steps and seconds that the saved run has behind it."""
    path = output / "state.safetensors"
    with safe_open(path, "pt") as stored:
        metadata = stored.metadata()
    optimizer.load(load_file(path))
    return int(metadata["steps"]), float(metadata["elapsed"])
