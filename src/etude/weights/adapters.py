"""Versions of adapters (LoRA), and the weights that an engine computes from them and the base.

The tensors of such a version are adapters; its manifest has the digests of the base and of the sum. The sum is computed
on the device of the live tensors, tensor by tensor, with the bits of the trainer's own sum
(`etude.models.lora.merged`). Host memory: the base, once, and the sums of the layers that have adapters.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import torch

from etude.errors import UserError
from etude.models.lora import DOWN, UP, merged, weight_name
from etude.records import AdaptedBase, PolicyVersion
from etude.store import Store
from etude.weights.content import Content, Tensors, load_content, load_schema, rounded
from etude.weights.manifest import Trust
from etude.weights.payloads import DamagedVersion
from etude.weights.ulpd import codec
from etude.weights.ulpd.chunk_grid import Schema, as_tensor, bits
from etude.weights.ulpd.digest import digest_text


def base_schema(store: Store, manifest: PolicyVersion) -> Schema:
    """Names, types and shapes of the tensors that an engine of this version computes with. Raises DamagedVersion."""
    adapted = manifest.adapted
    return load_schema(store, manifest, None if isinstance(adapted, msgspec.UnsetType) else adapted.schema)


class Base:
    """The weights under the adapters, copied from `live` and rounded to their published types. Raises DamagedVersion if
    they do not have the digest in `adapted`."""

    def __init__(self, live: Tensors, grid: Schema, version: int, adapted: AdaptedBase):
        self.digest = adapted.base
        try:
            self._content = rounded(live, grid)
        except ValueError as e:
            raise DamagedVersion(f"version {version} holds adapters of another model: {e}") from None
        if digest_text(codec.model_digest(self._content.digests)) != adapted.base:
            raise DamagedVersion(
                f"version {version} holds adapters of another base than the weights here; start the engine with the "
                "model folder that the run trains"
            )

    def merge(self, manifest: PolicyVersion, adapters: Content, devices: Mapping[str, torch.device]) -> Content:
        """The weights that an engine of the version computes with; each sum is computed on the tensor's device. Raises
        DamagedVersion if they differ from the trainer's."""
        adapted, of, grid = manifest.adapted, adapters.tensors(), self._content.schema
        assert not isinstance(adapted, msgspec.UnsetType)
        arrays, digests = dict(self._content.bits), self._content.digests.copy()
        specs = {spec.name: spec for spec in grid.tensors}
        try:
            for name in sorted(n.removesuffix(DOWN) for n in of if n.endswith(DOWN)):
                weight = weight_name(name, specs)
                own = as_tensor(arrays[weight], specs[weight]).view(specs[weight].shape).to(devices[weight])
                total = merged(own, of[name + DOWN], of[name + UP], adapted.scale, grid.types[weight])
                arrays[weight] = bits(total)
        except (KeyError, RuntimeError) as e:
            raise DamagedVersion(f"version {manifest.version}: its adapters do not fit the base ({e})") from None
        changed = {n for n in arrays if arrays[n] is not self._content.bits[n]}
        numbers = [i for i, chunk in enumerate(grid.chunks) if grid.tensors[chunk.tensor].name in changed]
        digests[numbers] = codec.digests(grid, arrays, chunks=numbers)[numbers]
        if digest_text(codec.model_digest(digests)) != adapted.live:
            raise DamagedVersion(
                f"version {manifest.version}: base and adapters do not add up to the tensors that the trainer computed "
                "with"
            )
        return Content(grid, arrays, digests)


def load_live(
    store: Store, version: int, base: Mapping[str, torch.Tensor], trust: Trust | None = None
) -> tuple[PolicyVersion, Content]:
    """The manifest of a published version, and the bits that an engine of it computes with. `base` are the tensors of
    the model that the run began with, to which adapters are added. Raises UserError."""
    manifest, content = load_content(store, version, trust, lambda: base)
    if isinstance(manifest.adapted, msgspec.UnsetType):
        return manifest, content
    try:
        held = Base(base, base_schema(store, manifest), version, manifest.adapted)
        return manifest, held.merge(manifest, content, {name: tensor.device for name, tensor in base.items()})
    except DamagedVersion as e:
        raise UserError(f"{store.url}: {e}") from None
