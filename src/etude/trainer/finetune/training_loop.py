"""The loop of the stages before reinforcement learning: batches in order, a schedule, checkpoints, and `resume`.

AdamW (Loshchilov & Hutter 2019) keeps float32 master weights and rounds them to the computed type after each step,
because updates smaller than a bfloat16 rounding step would otherwise be lost. The gradients of several passes are added
up in float32.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from etude import runfolder
from etude.code import lines_of
from etude.errors import UserError
from etude.trainer import checkpoint as checkpoints
from etude.trainer.activations import checkpoint_activations
from etude.trainer.finetune import folder
from etude.trainer.finetune.config import OptimConfig
from etude.trainer.finetune.passes import TrainingPass, numbers_of, pass_of
from etude.trainer.lora import AdapterAdamW, Adapters
from etude.trainer.optimizer import AdamWSettings, MasterAdamW
from etude.trainer.sharding import is_divided, last_pass, reshard, rows_only, within, world_of
from etude.trainer.world import World
from etude.weights.ranks import Ranks, Shard

Show = Callable[..., None]
"""Receives the progress for people: `done` of `total` steps, `seconds_left`, and figures by name."""
Loss = tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]
"""(loss, router balance, expert load [L, E], parts of the loss by the name of their metric)."""


class Steps(Protocol):
    """The passes of a run's optimizer steps, in order, each step taken once."""

    def start(self, done: int, state: str) -> None:
        """Goes to the first step, or on after `done` steps with the `state` of a checkpoint."""

    def take(self) -> Sequence[TrainingPass] | None:
        """The passes of the next step, none where nothing is learned; None at the end."""

    @property
    def share(self) -> float:
        """The share of all steps that is taken, 1 at the end; an estimate where their number is not known yet."""
        ...

    def state(self) -> str:
        """The place that `start` needs to go on here, besides the number of steps."""
        ...


class FixedSteps:
    """Steps that are all there."""

    def __init__(self, steps: Sequence[Sequence[TrainingPass]]) -> None:
        self._steps, self._done = steps, 0

    def start(self, done: int, state: str) -> None:
        """Goes on after `done` steps."""
        self._done = done

    def take(self) -> Sequence[TrainingPass] | None:
        """The passes of the next step."""
        if self._done >= len(self._steps):
            return None
        self._done += 1
        return self._steps[self._done - 1]

    @property
    def share(self) -> float:
        """The share of the steps that is taken."""
        return min(1.0, self._done / len(self._steps))

    def state(self) -> str:
        """Nothing: the number of steps is enough."""
        return ""


@dataclass(frozen=True)
class TrainingWork:
    """The work of a stage: `steps` of about `tokens` tokens each, whose passes are arguments of `compute`; `evaluate`
    returns the figures of a checkpoint."""

    steps: Steps
    tokens: int
    compute: Callable[[Any], Loss]
    evaluate: Callable[[], dict[str, float]]


@dataclass(frozen=True)
class StageRun:
    """The output folder of a stage, the folder of its tokenizer, and the limits of this run. `types` are the types of
    saved weights, by name; bfloat16 by default. `resume` continues from the saved state; `stop_after` ends after that
    many steps in all, with the state saved and the schedule unfinished, like a preempted run. `seed` is that of
    adapters; `show` receives the progress."""

    output: Path
    tokenizer: Path
    resume: bool = False
    stop_after: int | None = None
    types: Mapping[str, torch.dtype] = field(default_factory=dict)
    seed: int = 0
    show: Show | None = None


def optimizer_of(
    model: PreTrainedModel, config: OptimConfig, saved: Mapping[str, torch.dtype] | None = None, seed: int = 0
) -> MasterAdamW:
    """AdamW over float32 masters of the trained parameters, or of adapters whose sums with the weights have the types
    `saved`; the parameters then get the computed type. Matrices decay, vectors (norms) do not."""
    if config.lora is not None:
        settings = AdamWSettings(config.betas, config.weight_decay, config.grad_clip, "paper")
        folder.cast(model, folder.computed(model, config))
        folder.use_own_experts(model)
        adapters = Adapters(model, config.lora, saved, seed=seed, on_host=config.offload_optimizer)
        return AdapterAdamW(adapters, settings, offload=config.offload_optimizer, world=world_of(model))
    world, live = world_of(model), {name: p for name, p in model.named_parameters() if p.requires_grad}
    settings = AdamWSettings(config.betas, config.weight_decay, config.grad_clip, "paper", decay_vectors=False)
    dtype, own = folder.computed(model, config), {name: p.dtype for name, p in live.items()}
    main = folder.main_dtype(model)
    types = {name: dtype if kept == main else kept for name, kept in own.items()}
    rounds, offload = rows_only(model), config.offload_optimizer
    optimizer = MasterAdamW(live, settings, types=types, offload=offload, world=world, rounds=rounds)
    folder.cast(model, dtype)
    return optimizer


def learning_rate(config: OptimConfig, progress: float) -> float:
    """Warm-up, plateau, linear decay to zero; `progress` in [0, 1]."""
    rise = min(1.0, progress / config.warmup) if config.warmup > 0 else 1.0
    fall = min(1.0, max(0.0, 1.0 - progress) / config.decay)
    # The first step has progress 0 and would otherwise be wasted.
    return config.lr * min(max(rise, 0.02), fall)


def fit(model: PreTrainedModel, work: TrainingWork, config: OptimConfig, run: StageRun) -> PreTrainedModel:
    """Trains on all steps once, in order, or until the token target or the time budget is reached. Writes
    output/metrics.jsonl, output/checkpoint (a Hugging Face folder) and output/checkpoints (for resuming). Returns the
    model in evaluation mode. Several ranks compute some passes of each step, and rank 0 alone writes, but for its part
    of checkpoints. Raises UserError if a gradient is not finite, or the disk is full."""
    world = world_of(model)
    with runfolder.lock(run.output) if world.first else nullcontext(), world.named_failures():
        return _fit(model, work, config, run)


def _fit(model: PreTrainedModel, work: TrainingWork, config: OptimConfig, run: StageRun) -> PreTrainedModel:
    output, world = run.output, world_of(model)
    torch.set_num_threads(config.threads)
    model.eval()  # the model that is served: without dropout and noise of routers
    optimizer = optimizer_of(model, config, run.types, run.seed)
    if config.activation_checkpointing:
        checkpoint_activations(model)
    if not config.compile:
        for parameter in model.parameters():
            if not is_divided(parameter):  # FSDP sums the gradients of rows in their type, float32
                parameter.grad_dtype = torch.float32
    states = output / "checkpoints"
    steps, elapsed, place = _resume(states, optimizer, world) if run.resume else (0, 0.0, "")
    work.steps.start(steps, place)
    world.only_first(lambda: checkpoints.drop_after(states, steps))
    ranks = Ranks(world.rank, world.size, world.agree(lambda: token_hex(8)), world.control)
    writer = checkpoints.CheckpointWriter(states, keep=2, ranks=ranks)
    path, show = (output / "metrics.jsonl", run.show) if world.first else (None, None)
    record = _TrainingRecord(path, work.tokens, steps, elapsed, show)
    wanted, minutes = config.tokens or math.inf, config.minutes or math.inf

    def checkpoint() -> None:
        elapsed = record.elapsed()
        world.at(f"the evaluation and the checkpoint of step {steps}")
        record.write({"step": steps, "time": elapsed} | work.evaluate())
        types = dict.fromkeys(model.state_dict(), torch.bfloat16) | dict(run.types)
        folder.save(output / "checkpoint", model, _masters(optimizer), types, run.tokenizer)
        about = {"elapsed": str(elapsed), "place": work.steps.state()}
        writer.start(steps, checkpoints.parts_of(optimizer.state()), about=about)

    while steps != run.stop_after:
        share = max(steps * work.tokens / wanted, work.steps.share)
        progress = max(share, world.agree(record.elapsed) / 60 / minutes)
        if progress >= 1 or (passes := work.steps.take()) is None:
            break
        torch.manual_seed(run.seed + steps)
        lr = learning_rate(config, progress)
        steps += 1
        if not passes:
            continue
        figures = _step(model, work.compute, passes, optimizer, lr, config.router_aux, writer.wait)
        if not math.isfinite(figures["optim/grad_norm"]):
            raise UserError(f"the gradient is not finite at step {steps}; lower trainer.lr")
        if steps % config.log_every == 0 or steps == 1:
            share = max(steps * work.tokens / wanted, work.steps.share)
            record.step(steps, figures, share, minutes)
        if world.agree(lambda: record.checkpoint_due(config.checkpoint_minutes)):
            checkpoint()
    checkpoint()
    writer.close()
    return model.eval()


def _resume(states: Path, optimizer: MasterAdamW, world: World) -> tuple[int, float, str]:
    """Steps and seconds of the saved run so far, and the state of its `Steps`; 0 if it was killed before its first
    save. Each rank reads its rows, whatever the number of ranks that wrote them."""
    newest = checkpoints.load_newest(states, optimizer.rows, lambda why: next(filter(None, world.gathered(why)), ""))
    if newest is None:
        return 0, 0.0, ""
    steps, tensors, about = newest
    optimizer.load(tensors)
    return steps, float(about["elapsed"]), about["place"]


def _step(
    model: PreTrainedModel,
    compute: Callable[[Any], Loss],
    passes: Sequence[TrainingPass],
    optimizer: MasterAdamW,
    lr: float,
    router_aux: float,
    written: Callable[[], object],
) -> dict[str, Any]:
    """Backward pass and update, which is left out if the gradient is not finite, and waits until a checkpoint of the
    optimizer's tensors is `written`. Returns the figures, tensors where computed on the device: sums over the passes of
    the parts of the loss, means of the rest. The routers' balance is that of each pass."""
    world = world_of(model)
    numbers, figures = numbers_of(passes, world), _PassSums()
    for place, number in enumerate(numbers, 1):
        world.at(f"pass {place} of {len(numbers)}")
        last_pass(model, place == len(numbers))
        loss, balance, load_LE, parts = within(model, partial(compute, pass_of(passes, number).to(model.device)))
        term, weight = loss + router_aux * balance / len(passes), 0.0 if number is None else 1.0
        (weight * term).backward()
        figures.add(weight, loss, balance, load_LE, parts)
    reshard(model)
    norm = optimizer.collect()
    if math.isfinite(norm):
        written()
        optimizer.apply(lr)
    sums, balance, load_LE = figures.of_all_ranks(world)
    load_LE = load_LE / len(passes)
    return {
        **sums,
        "loss/aux": balance / len(passes),
        "optim/lr": lr,
        "optim/grad_norm": norm,
        "router/load_min": load_LE.min() if load_LE.numel() else 0.0,
        "router/load_max": load_LE.max() if load_LE.numel() else 0.0,
    }


class _PassSums:
    """Sums over passes, without gradient."""

    def __init__(self) -> None:
        self._sums: dict[str, Any] = {}
        self._balance: Any = 0.0
        self._load_LE: Any = 0.0

    def add(
        self, weight: float, loss: torch.Tensor, balance: torch.Tensor, load_LE: torch.Tensor, parts: dict[str, Any]
    ) -> None:
        """Adds those of a pass."""
        for name, value in ({"loss/token": loss} | parts).items():
            self._sums[name] = self._sums.get(name, 0.0) + weight * value.detach()
        self._balance = self._balance + weight * balance.detach()
        self._load_LE = self._load_LE + weight * load_LE.detach()

    def of_all_ranks(self, world: World) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
        """The sums of the parts of the loss, of the balance, and of the load [L, E], which is that of whole rows on
        each rank with a slice of them."""
        if world.size > 1:
            own = [*self._sums.values(), self._balance, self._load_LE / world.mesh.context]
            flat = torch.cat([value.double().flatten() for value in own])
            world.total([flat])
            *sums, self._balance, load_X = flat.split([value.numel() for value in own])
            self._sums = dict(zip(self._sums, (value[0] for value in sums), strict=True))
            self._balance, self._load_LE = self._balance[0], load_X.view_as(self._load_LE)
        return self._sums, self._balance, self._load_LE


class _TrainingRecord:
    """The clock of a run and its metrics.jsonl, which other ranks than the first do not write; `elapsed` seconds and
    `steps` belong to earlier attempts."""

    def __init__(self, path: Path | None, tokens: int, steps: int, elapsed: float, show: Show | None) -> None:
        self._path, self._tokens, self._show = path, tokens, show
        if path is not None and path.is_file():  # a killed run wrote lines of steps that are repeated now
            lines = lines_of(path.read_text(encoding="utf-8"), ends=True)
            runfolder.write(path, "".join(line for line in lines if _step_of(line) <= steps).encode())
        self._started = time.monotonic() - elapsed
        self._saved = self._logged = time.monotonic()
        self._steps = steps  # at the last line

    def elapsed(self) -> float:
        """Seconds of the run, including those before a resume."""
        return time.monotonic() - self._started

    def checkpoint_due(self, minutes: float) -> bool:
        """Whether the last checkpoint is older than `minutes`; if so, the count starts again."""
        due = time.monotonic() - self._saved > 60 * minutes
        if due:
            self._saved = time.monotonic()
        return due

    def step(self, steps: int, figures: dict[str, Any], share: float, minutes: float) -> None:
        """Writes the line of a step, after a `share` of the run's steps; it ends after `minutes`, too."""
        if self._path is None:
            return
        now = time.monotonic()
        speed = (steps - self._steps) * self._tokens / (now - self._logged)
        line = {"step": steps, "time": round(now - self._started, 2), "tokens": steps * self._tokens}
        line |= {name: float(value) for name, value in figures.items()} | {"perf/tokens_per_s": speed}
        self.write(line)
        self._logged, self._steps = now, steps
        if self._show is not None:
            elapsed = now - self._started
            done = max(share, elapsed / 60 / minutes)
            self._show(
                done=steps,
                total=max(steps, round(steps / share)),
                seconds_left=elapsed / done * max(0.0, 1 - done),
                loss=line["loss/token"],
                lr=line["optim/lr"],
                tokens_per_s=speed,
            )

    def write(self, line: dict[str, float]) -> None:
        """Appends a line to the metrics, and shows the held-out figures in it. Raises UserError if the disk is full."""
        if self._path is None:
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as e:
            raise UserError(f"{self._path} cannot be written: {e.strerror}; check the disk") from None
        measured = {name.replace("/", " "): value for name, value in line.items() if name.startswith("eval/")}
        if self._show is not None and measured:
            self._show(**measured)


def _masters(optimizer: MasterAdamW) -> dict[str, torch.Tensor | Shard]:
    parts = ((*name.partition("/"), tensor) for name, tensor in optimizer.state().items())
    return {name: tensor for part, _, name, tensor in parts if part == "master"}


def _step_of(line: str) -> float:
    """The step of a line of metrics; infinite for a truncated line."""
    try:
        return json.loads(line)["step"]
    except ValueError:
        return math.inf
