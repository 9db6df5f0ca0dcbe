"""etude inside a vLLM worker: `vllm serve MODEL --worker-extension-cls CLASS`, where CLASS is
`etude.inference.vllm.worker.WorkerExtension`.

vLLM makes that class a base of its worker, and `POST /collective_rpc` (a development route) calls its methods by name.
The arguments are strings; the result is a dict, with `error` after a refusal. The engine makes no step meanwhile.
`etude.protocol.backends.vllm` is the caller. A receiver like that of etude's own engine fetches, verifies and stages a
version in a thread while vLLM serves; its live tensors are the model's own memory (`etude.inference.vllm.layout`).

A server of several workers gets each call on all of them, and each answers for its slices. A swap is written on all;
the caller adds the digests of what each counts (`etude.inference.vllm.workers`), and has all commit or all undo.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from etude.errors import UserError
from etude.inference.vllm.layout import LoadableModel, check_plain, live_tensors, memory
from etude.inference.vllm.workers import Workers, whole_tensors
from etude.processes import end_with_server
from etude.protocol.backends import refused_parallelism
from etude.records import PolicyVersion
from etude.store import Store, open_store
from etude.weights import Trust, newest_manifest, read_public_key
from etude.weights.adapters import base_schema
from etude.weights.content import Content
from etude.weights.payloads import DamagedVersion, PayloadSource
from etude.weights.receiver import Receiver, WeightsMismatch, WeightUpdate
from etude.weights.slabs import Sliced

Answer = dict[str, Any]
MOVED = "this server loaded its weights anew behind etude's back; start it again"


@dataclass
class Following:
    """The store that a worker follows, and its progress."""

    source: tuple[str, str, str]  # URLs of store and relay, file of the public key
    model: LoadableModel
    receiver: Receiver
    beginning: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])  # until a version is live
    thread: threading.Thread | None = None
    staged: WeightUpdate | None = None
    written: WeightUpdate | None = None  # neither committed nor undone
    error: str = ""

    def __post_init__(self) -> None:
        self._memory = memory(self.model)

    def moved(self) -> bool:
        """Whether the model has moved to other memory than the memory that is written and digested here."""
        return memory(self.model) != self._memory

    def stage(self, version: int) -> None:
        """Fetches and verifies a version; runs on a thread of its own."""
        try:
            self.staged = self.receiver.poll(version)
        except (DamagedVersion, UserError) as e:
            self.error = str(e)
        except Exception as e:
            self.error = f"{type(e).__name__}: {e}"
            raise

    def digest(self, manifest: PolicyVersion, content: Content) -> Answer:
        """The version in the model's memory, the digest of its manifest, and the share of this worker in the digest of
        that memory: those of all workers add up to it."""
        try:
            share = self.receiver.digest(content)
        except ValueError as e:
            return {"error": str(e)}
        return {"version": manifest.version, "digest": manifest.live, "share": f"{share:016x}"}

    def answer(self) -> Answer:
        """The live version and its digest, whether staging runs, the staged version or -1, and the last error."""
        staging = self.thread is not None and self.thread.is_alive()
        staged = self.staged.manifest.version if self.staged is not None and not staging else -1
        held = self.receiver.held
        live = {"version": self.receiver.version, "digest": "" if held is None else held[0].live}
        return {**live, "staging": staging, "staged": staged, "error": self.error}


class WorkerExtension:
    """The methods that are added to vLLM's worker."""

    _etude: Following

    def etude_open(self, store: str, relay: str, public_key: str) -> Answer:
        """Follow a store: its URL, a relay's or "", and the file of a public key or "". May be repeated."""
        source = (store, relay, public_key)
        known: Following | None = getattr(self, "_etude", None)
        if known is not None:
            if known.source != source:
                return {"error": f"this server follows {known.source[0]} already; start it again to follow {store}"}
            return {"version": known.receiver.version}
        try:
            self._etude = _follow(self, source)
        except UserError as e:
            return {"error": str(e)}
        return {"version": -1}

    def etude_stage(self, version: str) -> Answer:
        """Begin to fetch and verify a version while another is served."""
        following = self._etude
        if not following.answer()["staging"]:
            following.staged, following.error = None, ""
            following.thread = threading.Thread(target=following.stage, args=(int(version),), daemon=True)
            following.thread.start()
        return following.answer()

    def etude_status(self) -> Answer:
        """The live version and the progress of staging, see `Following.answer`; no version without a store."""
        following: Following | None = getattr(self, "_etude", None)
        return {"version": -1, "digest": ""} if following is None else following.answer()

    def etude_swap(self, version: str) -> Answer:
        """Writes the staged version, between two steps; answers as `etude_digest`. Then all workers must commit or
        undo. After an `error` this worker holds the old version."""
        following, update = self._etude, self._etude.staged
        if update is None or update.manifest.version != int(version):
            return {"error": f"version {version} is not staged"}
        if following.moved():
            return {"error": MOVED}
        following.staged = None
        try:
            following.receiver.write(update)
        except (WeightsMismatch, ValueError) as e:
            return {"error": str(e)}
        following.written = update
        return following.digest(update.manifest, update.staged)

    def etude_commit(self) -> Answer:
        """Keeps a version that was written."""
        following = self._etude
        if following.written is not None:
            following.receiver.commit(following.written)
            following.written = None
            following.beginning.clear()
        return {"version": following.receiver.version}

    def etude_undo(self) -> Answer:
        """Takes a version back that was written."""
        following = self._etude
        if following.written is not None:
            following.receiver.undo(following.written)
            following.written = None
        return {"version": following.receiver.version}

    def etude_digest(self) -> Answer:
        """The version in the model's memory and the digest of this worker's share, see `Following.digest`."""
        following, written = self._etude, self._etude.written
        if following.moved():
            return {"error": MOVED}
        if written is not None:
            return following.digest(written.manifest, written.staged)
        if (held := following.receiver.held) is None:
            return {"error": "this server holds no version yet"}
        return following.digest(*held)


def _follow(worker: Any, source: tuple[str, str, str]) -> Following:
    from vllm.distributed.parallel_state import get_world_group

    if refused := refused_parallelism(vars(worker.vllm_config.parallel_config)):
        raise UserError(f"this server {refused}")
    group = get_world_group()
    workers = Workers(group.rank_in_group, group.world_size, group.cpu_group)
    url, relay, public_key = source
    store = open_store(url)
    model = worker.model_runner.get_model()
    live = workers.counted(lambda: _watched(worker, model, store))
    beginning = whole_tensors(workers, live)
    trust = Trust(read_public_key(Path(public_key)) if public_key else None)
    payloads = PayloadSource(store, relay or None, trust, (lambda: beginning) if beginning else None)
    return Following(source, model, Receiver(store, live, payloads), beginning)


def _watched(worker: Any, model: LoadableModel, store: Store) -> dict[str, Sliced]:
    """The model's memory of the published tensors, which holds the checkpoint's values. Raises UserError."""
    from vllm.model_executor.model_loader import get_model_loader

    try:
        manifest = newest_manifest(store)
        published = None if manifest is None else base_schema(store, manifest)
    except (DamagedVersion, ValueError) as e:
        raise UserError(f"{e}; publish to another store") from None
    if published is None:
        raise UserError(f"{store.url} has no version yet; feed it after the first one is published")
    live = live_tensors(model, published)
    loader = get_model_loader(worker.vllm_config.load_config)
    if not hasattr(loader, "get_all_weights"):
        raise UserError("this server did not load a checkpoint from files; start it without --load-format")
    check_plain(model, loader.get_all_weights(worker.vllm_config.model_config, model))
    return live


def _keep_plain_on_cpu() -> None:
    """Replaces vLLM's packing of weights on a CPU by plain products. The packing drops the originals, which must be
    written and digested here. vLLM imports this module before it loads a model."""
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return

    def plain(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = plain
    CPUUnquantizedExperts.process_weights_after_loading = lambda self, layer: None
    CPUUnquantizedExperts.apply = _experts


def _experts(
    self: Any,
    *,
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: Any,
    apply_router_weight_on_input: bool,
    **_: Any,
) -> None:
    """Mixed experts by their definition, with weights in the published layout. Shapes: output and hidden_states [T, D],
    w1 [E, 2I, D] (gates before ups), w2 [E, D, I], topk_weights and topk_ids [T, K]."""
    if activation.value != "silu" or self.w1_bias is not None or apply_router_weight_on_input:
        raise UserError("on a CPU, only SiLU experts without biases can follow a store; serve this model on a GPU")
    linear, silu = torch.nn.functional.linear, torch.nn.functional.silu
    total = torch.zeros(hidden_states.shape, dtype=torch.float32)
    for expert in topk_ids.unique().tolist():
        tokens, slots = torch.where(topk_ids == expert)
        gate, up = linear(hidden_states[tokens], w1[expert]).chunk(2, dim=-1)
        made = linear(silu(gate) * up, w2[expert])
        total.index_add_(0, tokens, made.float() * topk_weights[tokens, slots, None].float())
    output.copy_(total)


if find_spec("vllm") is not None:
    _keep_plain_on_cpu()
    end_with_server()
