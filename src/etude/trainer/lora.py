"""The trainer's half of LoRA: adapters are the float32 masters, and the model's weights follow them.

After construction and after each update the weights of the adapted layers are `etude.models.lora.merged`, rounded to
the published types. So trainer and engines compute with the same bits, as in training of all weights.

Of a divided model each rank has its rows of the weights and of their base, and all adapters: these are small.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from etude.config import LoraConfig, TrainerConfig
from etude.errors import UserError
from etude.models.dtypes import Types
from etude.models.loading import named_tensors
from etude.models.lora import DOWN, UP, adapted_layers, attach, first_values, is_transposed, merged, weight_name
from etude.records import AdaptedBase
from etude.trainer.optimizer import AdamWSettings, MasterAdamW
from etude.trainer.sharding import computed_experts, first_row, is_divided, local, shard_of, world_of
from etude.trainer.world import World
from etude.weights.ranks import Parts, Shard, digest_of_parts, schema_of_parts
from etude.weights.ulpd import Schema, digest_text, narrow_lossless


class Adapters:
    """Freezes a model and gives some of its layers adapters. `tensors` are A and B by their PEFT names, float32 leaves
    with gradients. `types` are the types of published tensors; bfloat16 by default. The base of the adapted layers is
    kept beside the model, with `on_host` in the host's memory. Raises UserError for targets that cannot have
    adapters."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: LoraConfig,
        types: Types | None = None,
        *,
        seed: int = 0,
        on_host: bool = False,
    ):
        self._model, self.scale = model, config.alpha / config.rank
        layers = adapted_layers(model, config.targets)
        model.requires_grad_(False)
        live = named_tensors(model)
        self._world, self._whole = world_of(model), live
        self._types = dict.fromkeys(live, torch.bfloat16) | dict(types or {})
        self._names = {layer: weight_name(layer, live) for layer in layers}
        self._weights = {name: local(live[name]) for name in self._names.values()}
        transposed = {layer for layer in layers if is_transposed(model, layer)}
        weights = {layer: live[name] for layer, name in self._names.items()}
        self.tensors = first_values(weights, config.rank, seed, transposed)
        for tensor in self.tensors.values():
            tensor.requires_grad_()
        self._base = {name: _copied(weight, self._types[name], on_host) for name, weight in self._weights.items()}
        for layer, name in self._names.items():
            with torch.no_grad():
                self._weights[name].copy_(self._base[name])  # equal to `merge`, since B is zero
            own = slice(None)
            if live[name].ndim == 3 and is_divided(live[name]):
                own = computed_experts(live[name])
            attach(model, layer, self.tensors[layer + DOWN][own], self.tensors[layer + UP][own], self.scale)

    @torch.no_grad()
    def merge(self) -> None:
        """Updates the model's weights from the adapters."""
        for layer, name in self._names.items():
            weight, pair = self._weights[name], (self.tensors[layer + DOWN], self.tensors[layer + UP])
            base, first = self._base[name].to(weight.device, non_blocking=True), first_row(self._whole[name])
            rows = slice(first, first + len(weight))
            weight.copy_(merged(base, *pair, self.scale, self._types[name], rows))

    @torch.no_grad()
    def round_frozen(self) -> None:
        """Rounds the weights that no adapter changes to their published types, as in a version of whole weights."""
        for name, tensor in self._whole.items():
            if name not in self._weights and tensor.is_floating_point():
                rows = local(tensor)
                rows.copy_(rows.to(self._types[name]))

    def frozen(self) -> dict[str, Tensor | Shard]:
        """The live tensors that no adapter changes, in the published types."""
        frozen = {name: tensor for name, tensor in self._whole.items() if name not in self._weights}
        return {
            name: shard_of(tensor, narrow_lossless(name, local(tensor), self._types[name]), self._world)
            for name, tensor in frozen.items()
        }

    def base(self) -> dict[str, Tensor | Shard]:
        """The base of the adapted layers, in the published types."""
        return {name: shard_of(self._whole[name], rows, self._world) for name, rows in self._base.items()}

    def live(self) -> dict[str, Tensor | Shard]:
        """The present weights of the adapted layers."""
        return {name: shard_of(self._whole[name], rows, self._world) for name, rows in self._weights.items()}

    def digest(self, parts: Parts) -> int:
        """The digest of tensors of this model, as the number that sums over all ranks and other tensors."""
        types = {name: self._types[name] for name in parts}
        return sum(self._world.gathered(digest_of_parts(parts, types)))


def _copied(weight: Tensor, dtype: torch.dtype, on_host: bool) -> Tensor:
    """A copy in another type; `on_host` in the host's memory, pinned if that speeds up the copy back."""
    if not on_host:
        return weight.to(dtype, copy=True)
    return torch.empty_like(weight, dtype=dtype, device="cpu", pin_memory=weight.device.type == "cuda").copy_(weight)


class AdapterAdamW(MasterAdamW):
    """AdamW on adapters, whose model follows them. Versions hold the float32 masters of the adapters."""

    def __init__(
        self, adapters: Adapters, settings: AdamWSettings, *, offload: bool = False, world: World | None = None
    ):
        self.adapters = adapters
        types = dict.fromkeys(adapters.tensors, torch.float32)
        super().__init__(adapters.tensors, settings, types=types, offload=offload, world=world)
        adapters.round_frozen()
        frozen, base = adapters.frozen(), adapters.base()
        self._frozen = adapters.digest(frozen)
        self._schema = schema_of_parts(frozen | base)
        self._base_digest = self._with_frozen(base)

    def apply(self, lr: float) -> None:
        """Updates the adapters that have a gradient, and the model's weights. Raises AssertionError if one has none."""
        missing = [name for name in self._live if name not in self._grads] if self._grads else []
        assert not missing, f"no gradient reached {missing[0]}: its layer is not computed by its forward"
        super().apply(lr)
        self.adapters.merge()

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `state`. Raises UserError for a state of other adapters."""
        there = {name: t.shape for name, t in tensors.items() if name.startswith("master/")}
        if there != {f"master/{name}": t.shape for name, t in self._live.items()}:
            raise UserError("the checkpoint holds other tensors than lora.targets and lora.rank say; start a new run")
        super().load(tensors)
        self.adapters.merge()

    def follow(self, published: Mapping[str, Tensor]) -> None:
        """Moves the adapters to a published version, and updates the model's weights."""
        super().follow(published)
        self.adapters.merge()

    @property
    def base_schema(self) -> Schema:
        """The schema of the model's tensors."""
        return self._schema

    def adapted(self) -> AdaptedBase:
        """The base of the adapters, and the digest of the model's present weights."""
        live = self._with_frozen(self.adapters.live())
        return AdaptedBase(scale=self.adapters.scale, schema=self._schema.id, base=self._base_digest, live=live)

    def _with_frozen(self, parts: Parts) -> str:
        """The digest of the whole model with these tensors: a digest is a sum over elements."""
        return digest_text(self._frozen + self.adapters.digest(parts))


def for_adapters(
    model: PreTrainedModel, config: TrainerConfig, lora: LoraConfig, types: Types | None = None, *, seed: int = 0
) -> AdapterAdamW:
    """The optimizer of an RL run with adapters. `types` are those of the model's published tensors."""
    adapters = Adapters(model, lora, types, seed=seed, on_host=config.offload_optimizer)
    settings = AdamWSettings(config.betas, config.weight_decay, config.grad_clip)
    return AdapterAdamW(adapters, settings, offload=config.offload_optimizer, world=world_of(model))
