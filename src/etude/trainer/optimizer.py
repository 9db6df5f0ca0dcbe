"""AdamW on float32 master weights; the model holds their rounding, in bfloat16 for most checkpoints, which is published
and served."""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from etude.config import TrainerConfig
from etude.models.dtypes import Types
from etude.models.loading import named_tensors
from etude.records import AdaptedBase
from etude.trainer.sharding import first_row, is_divided, local, own_rows, shard_of, world_of
from etude.trainer.world import World
from etude.weights.ranks import Shard
from etude.weights.ulpd import Schema

EPSILON = 1e-8
BUCKET = 2**26  # elements updated at a time, which bounds the memory of temporary tensors and copies


@dataclass(frozen=True)
class AdamWSettings:
    """The options of an update. `order` is the place of the second moment's bias correction: after the root, as in
    torch.optim.AdamW, or before it, as in the paper (Loshchilov & Hutter, arXiv:1711.05101, algorithm 2). The two
    differ in the last bit, and runs must repeat bit for bit; with "paper" the clipping factor is a float64, too."""

    betas: tuple[float, float]
    weight_decay: float
    clip: float
    order: Literal["torch", "paper"] = "torch"
    decay_vectors: bool = True  # norms and biases, too


class MasterAdamW:
    """Owns the master copy of every trained tensor; call `collect`, then `apply` or `drop`. After construction and
    after each update the live tensors hold exactly the master rounded to its type in `types` (bfloat16 by default),
    upcast to their own, so trainer and engine compute with the same numbers. The order of `live` is that of the sum in
    the gradient's norm. `fixed` tensors are published and not trained. `offload`: masters and moments are in the host's
    memory, pinned for a GPU; the device updates a bucket of them at a time, with the same kernels and bits.

    With several ranks, masters and moments are those of the rows that this rank holds, and gradients of tensors that
    all ranks hold are summed here. `rounds`: passes round the live tensors themselves, which are then the masters."""

    def __init__(
        self,
        live: Mapping[str, torch.Tensor],
        settings: AdamWSettings,
        fixed: Mapping[str, torch.Tensor] | None = None,
        types: Types | None = None,
        *,
        offload: bool = False,
        world: World | None = None,
        rounds: bool = False,
    ):
        self._settings = settings
        self._trained = dict(live)
        self._live = {name: local(tensor) for name, tensor in live.items()}
        self._fixed = dict(fixed or {})
        self._offload, self._world, self._rounds = offload, world or World(), rounds
        self._first, self._second = ({n: self._state_like(t) for n, t in self._live.items()} for _ in range(2))
        if rounds:
            self._master = {name: tensor.detach() for name, tensor in self._live.items()}
        else:
            self._master = {name: self._state_like(tensor) for name, tensor in self._live.items()}
            for name, tensor in self._live.items():
                self._master[name].copy_(tensor.detach())
        self._types = dict.fromkeys((*self._live, *self._fixed), torch.bfloat16) | dict(types or {})
        self._steps = dict.fromkeys(self._live, 0)
        self._grads: dict[str, torch.Tensor] = {}
        self._norm = torch.zeros(())
        self._round()

    @torch.no_grad()
    def collect(self) -> float:
        """Takes the gradients from the live tensors. Returns their norm before clipping, which may be NaN."""
        self._grads = {name: local(t.grad).float() for name, t in self._trained.items() if t.grad is not None}
        for tensor in self._trained.values():
            tensor.grad = None
        norms = torch._foreach_norm(list(self._grads.values())) if self._grads else [torch.zeros(())]
        self._norm = torch.linalg.vector_norm(torch.stack(norms))
        if self._world.size > 1:
            self._norm = self._norm_of_all()
        return self._norm.item()

    def _norm_of_all(self) -> torch.Tensor:
        """The norm over all ranks, after the sums of gradients that FSDP does not make."""
        whole = [grad for name, grad in self._grads.items() if not is_divided(self._trained[name])]
        self._world.total(whole)
        parts = [grad for name, grad in self._grads.items() if is_divided(self._trained[name])]
        device = next(iter(self._live.values())).device
        of_parts, of_whole = (
            sum((grad.double().square().sum() for grad in some), torch.zeros((), dtype=torch.float64, device=device))
            for some in (parts, whole)
        )
        self._world.total([of_parts])
        return (of_parts / self._world.mesh.replicate + of_whole).sqrt().float()

    @torch.no_grad()
    def apply(self, lr: float) -> None:
        """Updates the tensors that have a gradient, and frees the collected gradients."""
        settings, names = self._settings, list(self._grads)
        if not names:
            return
        clip: Any = min(1.0, settings.clip / (self._norm.item() + 1e-6)) if settings.order == "paper" else None
        if clip is None:
            clip = torch.clamp(settings.clip / (self._norm + 1e-6), max=1.0)
        for name in names:
            self._steps[name] += 1
        for bucket in self._buckets(names):
            self._update(bucket, clip, lr)
        self.drop()

    def _buckets(self, names: Sequence[str]) -> Iterator[list[tuple[str, slice]]]:
        """Parts of the flat tensors, together at most `BUCKET` elements."""
        bucket: list[tuple[str, slice]] = []
        room = BUCKET
        for name in names:
            size = self._live[name].numel()
            if bucket and size > room:
                yield bucket
                bucket, room = [], BUCKET
            for begin in range(0, size, BUCKET):
                part = slice(begin, min(begin + BUCKET, size))
                bucket.append((name, part))
                room -= part.stop - part.start
                if room <= 0:
                    yield bucket
                    bucket, room = [], BUCKET
        if bucket:
            yield bucket

    def _update(self, bucket: Sequence[tuple[str, slice]], clip: Any, lr: float) -> None:
        settings = self._settings
        grads = [self._grads[name].reshape(-1)[part] for name, part in bucket]
        hosts = [[state[name].view(-1)[part] for name, part in bucket] for state in self._states]
        # Without offload these are the states themselves, not copies.
        masters, first, second = (
            [host.to(grad.device, non_blocking=True) for host, grad in zip(state, grads, strict=True)]
            for state in hosts
        )
        torch._foreach_mul_(grads, clip)
        beta1, beta2 = settings.betas
        bias1 = [1 - beta1 ** self._steps[n] for n, _ in bucket]
        bias2 = [1 - beta2 ** self._steps[n] for n, _ in bucket]
        decay = [settings.weight_decay * (self._live[n].ndim > 1 or settings.decay_vectors) for n, _ in bucket]
        torch._foreach_mul_(masters, [1 - lr * d for d in decay])
        torch._foreach_lerp_(first, grads, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grads, grads, 1 - beta2)
        if settings.order == "torch":
            scale = torch._foreach_sqrt(second)
            torch._foreach_div_(scale, [b**0.5 for b in bias2])
        else:
            scale = torch._foreach_div(second, bias2)
            torch._foreach_sqrt_(scale)
        torch._foreach_add_(scale, EPSILON)
        torch._foreach_addcdiv_(masters, first, scale, [-lr / b for b in bias1])
        if not self._rounds:
            for (name, part), master in zip(bucket, masters, strict=True):
                self._live[name].view(-1)[part].copy_(master.to(self._types[name]))
        if self._offload:
            for host, state in zip(hosts, (masters, first, second), strict=True):
                for there, here in zip(host, state, strict=True):
                    there.copy_(here)

    @property
    def _states(self) -> tuple[dict[str, torch.Tensor], ...]:
        return self._master, self._first, self._second

    def _state_like(self, tensor: torch.Tensor) -> torch.Tensor:
        where = "cpu" if self._offload else tensor.device
        pinned = self._offload and tensor.device.type == "cuda"
        return torch.zeros(tensor.shape, dtype=torch.float32, device=where, pin_memory=pinned)

    def drop(self) -> None:
        """Frees the collected gradients without an update."""
        self._grads = {}

    @torch.no_grad()
    def _round(self) -> None:
        if not self._rounds:
            for name, live in self._live.items():
                live.copy_(self._master[name].to(self._types[name]))

    @property
    def live(self) -> Mapping[str, torch.Tensor]:
        """The tensors that are trained."""
        return self._trained

    @property
    def base_schema(self) -> Schema | None:
        """The schema of the base, if the trained tensors are adapters; None if they are the model's weights."""
        return None

    def adapted(self) -> AdaptedBase | None:
        """The base of adapters as recorded in a version's manifest."""
        return None

    def published(self) -> dict[str, torch.Tensor | Shard]:
        """The tensors of the current version, or this rank's shards of them, each in its type; saved buffers are
        published with the trained tensors. A float32 tensor is the master itself."""
        tensors = {n: (self._trained.get(n, t), t.detach()) for n, t in (self._master | self._fixed).items()}
        return {n: shard_of(of, t.to(self._types[n]), self._world) for n, (of, t) in tensors.items()}

    def state(self) -> dict[str, torch.Tensor | Shard]:
        """The complete state for exact resume, as named float32 tensors, or this rank's shards of them."""
        parts = {"master": self._master, "exp_avg": self._first, "exp_avg_sq": self._second}
        state = {
            f"{p}/{n}": shard_of(self._trained[n], t, self._world) for p, own in parts.items() for n, t in own.items()
        }
        steps = {f"step/{name}": torch.tensor(float(n)) for name, n in self._steps.items()}
        return state | {name: shard_of(step, step, self._world) for name, step in steps.items()}

    def rows(self, name: str, total: int) -> range:
        """The rows of a tensor of `state` that this rank loads, of `total` rows."""
        trained = self._trained.get(name.partition("/")[2])
        if trained is None or name.startswith("step/") or not is_divided(trained):
            return range(total)
        first = first_row(trained)
        return range(first, first + len(local(trained)))

    @torch.no_grad()
    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """The inverse of `state`: the rows of each tensor that `rows` names."""
        for part, own in (("master", self._master), ("exp_avg", self._first), ("exp_avg_sq", self._second)):
            for name, tensor in own.items():
                if tensor.numel():  # a checkpoint has nothing for a rank without rows
                    tensor.copy_(tensors[f"{part}/{name}"])
        self._steps = {name: int(tensors[f"step/{name}"]) for name in self._steps}
        self.drop()
        self._round()

    @torch.no_grad()
    def follow(self, published: Mapping[str, torch.Tensor]) -> None:
        """Moves the master weights to a published version, whose whole tensors these are; masters that round to it
        already stay unchanged."""
        for name, master in self._master.items():
            target = own_rows(self._trained[name], published[name]).to(master.device)
            whole = torch.int16 if target.element_size() == 2 else torch.int32
            moved = master.to(target.dtype).view(whole) != target.view(whole)
            master.copy_(torch.where(moved, target.float(), master))
        self._round()


def for_policy(model: PreTrainedModel, config: TrainerConfig, types: Types | None = None) -> MasterAdamW:
    """The optimizer of an RL run, over all parameters of the model, whose gradients are summed in float32 from now on.
    `types` are the types of its versions."""
    live, world = dict(sorted(model.named_parameters())), world_of(model)
    for parameter in live.values():
        if not is_divided(parameter):  # of divided ones FSDP sums the gradients in the type of the rows, float32
            parameter.grad_dtype = torch.float32  # sums of hundreds of passes would lose small gradients in bfloat16
    fixed = {name: t for name, t in named_tensors(model).items() if name not in live}
    settings = AdamWSettings(config.betas, config.weight_decay, config.grad_clip)
    rounds = config.dtype != "float32" and any(map(is_divided, live.values()))
    return MasterAdamW(live, settings, fixed, types, offload=config.offload_optimizer, world=world, rounds=rounds)


def learning_rate(config: TrainerConfig, number: int, progress: float) -> float:
    """The learning rate of step `number`, counted from 1; `progress` in [0, 1] is the share of the run behind it."""
    lr = config.lr * min(1.0, number / (config.warmup_steps + 1))
    return lr * min(1.0, max(0.0, 1 - progress) / config.decay) if config.decay else lr
