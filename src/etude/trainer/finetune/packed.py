"""Training on packed rows: the passes over them, and their loss.

    isolated   the examples of some rows in one row, each under its own causal mask; a prefix that several share is
               computed once
    crossing   rows unchanged: an example sees those before it. All passes have one shape, so they can be compiled
    none       one example at a time, for architectures that cannot compute isolated rows

Suffixes: B rows, T tokens of a row, N tokens of a pass, K labelled tokens of a pass, V vocabulary, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from etude.corpus import Encoded, Rows
from etude.errors import UserError
from etude.models import context_parallel
from etude.models.context_parallel import RowSlice
from etude.models.head import head_of
from etude.models.segments import Graph, Node, Trie, trie
from etude.trainer.finetune.config import OptimConfig
from etude.trainer.finetune.folder import Packing, hidden_of
from etude.trainer.finetune.passes import StepPasses, numbers_of, pass_of
from etude.trainer.finetune.routers import Routers
from etude.trainer.finetune.streamed import StreamedRows, StreamedSteps
from etude.trainer.finetune.training_loop import FixedSteps, Loss, StageRun, Steps, TrainingWork, fit
from etude.trainer.head import token_logprobs
from etude.trainer.sharding import reshard, within, world_of

_PADDED = 256  # rows are padded to a multiple of so many tokens: oneDNN compiles for each shape


@dataclass(frozen=True)
class PackedPass:
    """The input of one pass: `rows` [B, T], or the nodes of `graph`, isolated or a single one. `index_K` are the flat
    positions that predict the tokens `targets_K`; `weights_K` is 0 for padding, `total` the sum of weights of the whole
    optimizer step."""

    ids_BT: Tensor
    index_K: Tensor
    targets_K: Tensor
    weights_K: Tensor
    total: Tensor
    graph: Graph | None = None
    isolated: bool = False

    def to(self, device: torch.device) -> PackedPass:
        """The same on a device."""
        names = ("ids_BT", "index_K", "targets_K", "weights_K", "total")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})


@dataclass(frozen=True)
class PackedSteps(Sequence[StepPasses[PackedPass]]):
    """The passes of every optimizer step over `rows`, `batch` rows each, fewer in the last step; no pass where nothing
    is learned. Sizes of passes count a common prefix as often as it occurs. `pad` is an id for padding; `width` the
    padded number of labelled positions in a pass of crossing rows, so that all have one shape."""

    rows: Rows
    batch: int
    at_once: int
    kind: Packing
    pad: int
    width: int

    @classmethod
    def of(cls, rows: Rows, config: OptimConfig, kind: Packing, pad: int, *, some: bool = False) -> PackedSteps:
        """The steps over these rows, which may be `some` of those of a compiled run. Raises UserError if there is no
        row."""
        if not len(rows.ids):
            raise UserError("there is nothing to train on: the data gives no row")
        at_once = config.micro_batch or -(-config.batch // config.mesh.data_ranks)
        counts = [int(rows.mask[i : i + at_once, 1:].sum()) for i in range(0, len(rows.ids), at_once)]
        most = at_once * (rows.ids.shape[1] - 1)
        width = most if some and config.compile else min(-(-max(counts) // 64) * 64, most)
        return cls(rows, config.batch, at_once, kind, pad, width)

    def __len__(self) -> int:
        return -(-len(self.rows.ids) // self.batch)

    def __getitem__(self, index: int) -> StepPasses[PackedPass]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not 0 <= index < len(self):
            raise IndexError(index)
        first = index * self.batch
        last = min(first + self.batch, len(self.rows.ids))
        # No position, or one of another document, predicts the first token of a document.
        labelled = self.rows.mask[first:last, 1:] > 0
        if self.kind != "crossing":
            labelled &= self.rows.starts[first:last, 1:] == 0
        total = torch.tensor(float(max(1, labelled.sum())))
        spans = [(i, min(i + self.at_once, last)) for i in range(first, last, self.at_once)]
        if self.kind == "crossing":
            sizes = [self.at_once * self.rows.ids.shape[1]] * len(spans)
            return StepPasses(
                tuple(sizes), total, lambda i: self._crossing(*spans[i], total), lambda: self._crossing(0, 0, total)
            )
        packs = [[example for row in range(*span) for example in self._examples(row)] for span in spans]
        packs = [examples for examples in packs if examples]
        isolated = self.kind == "isolated"
        if not isolated:
            packs = [[example] for examples in packs for example in examples]
        return StepPasses(
            tuple(sum(len(ids) for ids, _ in examples) for examples in packs),
            total,
            lambda i: _of_nodes(packs[i], total, self.pad, isolated=isolated),
            lambda: _of_nodes([(np.full(2, self.pad), np.array([0, 1]))], total, self.pad, isolated=isolated),
        )

    def _crossing(self, first: int, last: int, total: Tensor) -> PackedPass:
        ids_BT = np.full((self.at_once, self.rows.ids.shape[1]), self.pad, dtype=np.int64)
        mask_BT = np.zeros(ids_BT.shape, dtype=bool)
        ids_BT[: last - first], mask_BT[: last - first] = self.rows.ids[first:last], self.rows.mask[first:last]
        ahead = np.zeros_like(mask_BT)
        ahead[:, :-1] = mask_BT[:, 1:]
        labelled = np.flatnonzero(ahead)
        index_K, weights_K = np.zeros(self.width, dtype=np.int64), np.zeros(self.width, dtype=np.float32)
        index_K[: len(labelled)], weights_K[: len(labelled)] = labelled, 1.0
        targets_K = np.roll(ids_BT, -1, axis=1).reshape(-1)[index_K]
        ids, index, targets, weights = map(torch.from_numpy, (ids_BT, index_K, targets_K, weights_K))
        return PackedPass(ids, index, targets, weights, total)

    def _examples(self, row: int) -> list[Encoded]:
        """The examples of a row with a token to learn, without the padding."""
        starts = [*np.flatnonzero(self.rows.starts[row]).tolist(), self.rows.ids.shape[1]]
        spans = [(a, b) for a, b in pairwise(starts) if self.rows.starts[row, a] == 1]
        parts = [(self.rows.ids[row, a:b].astype(np.int64), self.rows.mask[row, a:b]) for a, b in spans]
        return [(ids, mask) for ids, mask in parts if mask[1:].any()]


def _of_nodes(examples: Sequence[Encoded], total: Tensor, pad: int, *, isolated: bool) -> PackedPass:
    """A pass of one row [1, N]. Isolated, it is the prefix tree of the examples: a common prefix, such as the
    definitions of tools, is computed once. Otherwise it is one example."""
    rows = [ids for ids, _ in examples]
    tree = trie(rows) if isolated else Trie(Graph((Node(rows[0]),)), ((0,),))
    nodes = list(tree.graph.nodes)
    if isolated and (padding := -sum(map(len, nodes)) % _PADDED):
        nodes.append(Node(np.full(padding, pad, dtype=np.int64)))
    graph = Graph(tuple(nodes))
    before = [np.flatnonzero(mask[1:]) for _, mask in examples]
    index_K = np.concatenate([tree.where(row)[at] for row, at in enumerate(before)])
    targets_K = np.concatenate([ids[at + 1] for ids, at in zip(rows, before, strict=True)])
    weights_K = np.ones(len(index_K), dtype=np.float32)
    ids_1N, index, target, weights = map(torch.from_numpy, (graph.ids_T[None], index_K, targets_K, weights_K))
    return PackedPass(ids_1N, index, target, weights, total, graph, isolated)


def own_part(part: PackedPass) -> tuple[PackedPass, RowSlice | None]:
    """The pass with the labelled tokens that this rank predicts, and its slice, where ranks compute rows together:
    those predicted from positions of the slice, counted from its first. Elsewhere the same pass, and None."""
    if context_parallel.alone():
        return part, None
    if part.graph is None:
        raise ValueError("ranks compute passes of a graph together, not crossing rows")
    row = context_parallel.row_slice(part.graph.length)
    mine_K = (part.index_K >= row.here.start) & (part.index_K < row.here.stop)
    index_K, targets_K, weights_K = (x[mine_K] for x in (part.index_K, part.targets_K, part.weights_K))
    return replace(part, index_K=index_K - row.here.start, targets_K=targets_K, weights_K=weights_K), row


def hidden_states(model: PreTrainedModel, part: PackedPass) -> Tensor:
    """Last hidden states [K, D] at the positions that predict a labelled token."""
    if part.graph is not None:
        return hidden_of(model, part.graph, isolated=part.isolated)[part.index_K]
    hidden_BTD = model.get_decoder()(input_ids=part.ids_BT, use_cache=False).last_hidden_state
    return hidden_BTD.flatten(0, 1)[part.index_K]


def loss_function(model: PreTrainedModel, *, compiled: bool = False) -> Callable[[PackedPass], Loss]:
    """A function pass -> (its part of the step's token loss, router balance, expert load [L, E], {}). It computes
    logits only at positions that predict a labelled token; some at a time, but all at once if it is compiled. Where
    ranks compute rows together, loss and balance are those of this rank's slice: their sums are the row's."""
    routers = Routers.of(model)

    def compute(part: PackedPass) -> Loss:
        routers.clear()
        part, row = own_part(part)
        hidden_KD = hidden_states(model, part)
        if compiled:
            head = head_of(model)
            logits_KV = head.finish(F.linear(hidden_KD, head.weight_VD)).float()
            losses_K = F.cross_entropy(logits_KV, part.targets_K, reduction="none")
        else:
            of_K, targets_K = np.arange(len(hidden_KD)), part.targets_K.cpu().numpy()
            losses_K = -token_logprobs(head_of(model), hidden_KD, of_K, targets_K)[0]
        loss = (losses_K * part.weights_K).sum() / part.total
        return loss, *routers.balance(loss, row), {}

    return compute


@torch.no_grad()
def evaluate_loss(model: PreTrainedModel, compute: Callable[[PackedPass], Loss], steps: PackedSteps) -> float:
    """Mean token loss over all rows, weighted by labelled tokens. Ranks compute some passes of each step."""
    world, total, count = world_of(model), 0.0, 0.0
    for index, step in enumerate(steps, 1):
        labelled = float(step.total) if len(step) else 0.0
        world.at(f"held-out rows {index} of {len(steps)}")
        for number in numbers_of(step, world):
            loss = within(model, partial(compute, pass_of(step, number).to(model.device)))[0]
            total += labelled * float(loss) * (number is not None)
        count += labelled
    reshard(model)
    return sum(world.gathered(total)) / max(count, 1.0)


def train(
    model: PreTrainedModel,
    rows: Rows | StreamedRows,
    held_out: Rows | None,
    config: OptimConfig,
    run: StageRun,
    *,
    kind: Packing,
    pad: int,
    measure: Callable[[PreTrainedModel], dict[str, float]] | None = None,
    compute: Callable[[PackedPass], Loss] | None = None,
) -> PreTrainedModel:
    """Trains on all rows once, in order, with the loss `compute` or by default `loss_function`. See
    `training_loop.fit`. With every checkpoint the loss on the rows `held_out`, or those of the stream, is measured, and
    `measure` adds its figures."""
    torch.set_num_threads(config.threads)
    eager = loss_function(model, compiled=config.compile) if compute is None else compute

    def evaluate() -> dict[str, float]:
        tests = rows.held_out if isinstance(rows, StreamedRows) else held_out
        loss: dict[str, float] = {}
        if tests is not None:
            loss["eval/heldout/loss"] = evaluate_loss(model, eager, PackedSteps.of(tests, config, kind, pad))
        return loss if measure is None else loss | measure(model)

    def of_step(some: Rows) -> StepPasses[PackedPass]:
        return PackedSteps.of(some, config, kind, pad, some=True)[0]

    if isinstance(rows, StreamedRows):
        steps: Steps = StreamedSteps(rows, config.batch, of_step)
    else:
        steps = FixedSteps(PackedSteps.of(rows, config, kind, pad))
    faster = _compiled(eager) if config.compile else eager
    return fit(model, TrainingWork(steps, config.batch * config.length, faster, evaluate), config, run)


def _compiled(compute: Callable[[PackedPass], Loss]) -> Callable[[PackedPass], Loss]:
    def of(ids_BT: Tensor, index_K: Tensor, targets_K: Tensor, weights_K: Tensor, total: Tensor) -> Loss:
        return compute(PackedPass(ids_BT, index_K, targets_K, weights_K, total))

    inner = torch.compile(of)
    return lambda part: inner(part.ids_BT, part.index_K, part.targets_K, part.weights_K, part.total)
