"""Fine-tuning on prompts with documents, under two masks: each document sees only itself, or all of them are one text.

A sample is some documents and tails that see all of them, but not each other: the documents are computed once for all
its tails. For a share of the samples each document is its own node of the segment graph ("own"), for the others all are
one plain causal node ("full"), so that the model stays usable in both ways (Block-Attention, arXiv:2409.15355). The
loss on the tails' answers is

    cross-entropy  +  kl * KL(full || own)  on the samples of the first kind,

where "full" is a pass of the same weights over the same tokens under the full mask, without gradient.

Suffixes: T tokens of a batch, K positions that predict a labelled token, M those of them in "own" samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from etude.corpus import Chat, Encoded, best_fit, encode_chat
from etude.corpus import RetrievalSample as Questions
from etude.models.head import head_of
from etude.models.segments import Graph, Node
from etude.renderers import Renderer
from etude.trainer.finetune import folder
from etude.trainer.finetune.routers import Routers
from etude.trainer.finetune.training_loop import Loss

_WIDTH = 64  # labelled positions are padded to a multiple of this: oneDNN compiles for each shape
_TEACHER = 256  # the same for the tokens of a pass without gradient
_CHUNK = 256  # samples encoded at a time


@dataclass(frozen=True)
class DocumentSample:
    """Token ids of documents, and tails (ids, mask): mask is 1 for learned tokens, never for a tail's first."""

    documents: tuple[np.ndarray, ...]
    tails: tuple[Encoded, ...]

    def __len__(self) -> int:
        return sum(map(len, self.documents)) + sum(len(ids) for ids, _ in self.tails)


def encode(renderer: Renderer, retrieved: Sequence[Questions]) -> list[DocumentSample]:
    """Samples of cross-file retrieval, rendered like the engine's chat route, one tail per question."""
    return [
        DocumentSample(
            tuple(np.array(renderer.document(title, text), dtype=np.uint32) for title, text in sample.documents),
            tuple(encode_chat(_chat(question.text, question.answer), renderer) for question in sample.questions),
        )
        for sample in retrieved
    ]


def _chat(question: str, answer: str) -> Chat:
    return Chat(question, ({"role": "user", "content": question}, {"role": "assistant", "content": answer}))


def take(retrieved: Iterator[Questions], renderer: Renderer, tokens: int, longest: int) -> list[DocumentSample]:
    """Encoded samples until their tokens reach `tokens`, without those longer than `longest`. Raises ValueError after
    hundreds of consecutive long ones."""
    taken: list[DocumentSample] = []
    total = 0
    while total < tokens:
        some = [sample for sample in encode(renderer, list(islice(retrieved, _CHUNK))) if len(sample) <= longest]
        if not some:
            raise ValueError(
                f"samples are longer than {longest} tokens, a row: raise trainer.batch or lower documents.most"
            )
        for sample in some:
            if total < tokens:
                taken.append(sample)
                total += len(sample)
    return taken


def nodes_of(sample: DocumentSample, own: bool, seen: int = 0) -> list[Node]:
    """The nodes of one sample, after `seen` nodes in the graph; ids and positions are the same for either mask."""
    starts = list(accumulate(map(len, sample.documents), initial=0))
    ids = [np.asarray(document, dtype=np.int64) for document in sample.documents]
    nodes = [Node(document, start) for document, start in zip(ids, starts, strict=False)]
    if nodes and not own:
        nodes = [Node(np.concatenate(ids))]
    sees = tuple(range(seen, seen + len(nodes)))
    return nodes + [Node(tail.astype(np.int64), starts[-1], sees) for tail, _ in sample.tails]


def graph_of(samples: Sequence[DocumentSample], own: Sequence[bool], length: int = 0, pad: int = 0) -> Graph:
    """Samples side by side in one row, padded to `length` tokens with a node that no other node sees."""
    nodes: list[Node] = []
    for sample, alone in zip(samples, own, strict=True):
        nodes += nodes_of(sample, alone, len(nodes))
    padding = length - sum(map(len, nodes))
    return Graph((*nodes, Node(np.full(padding, pad)))) if padding > 0 else Graph(tuple(nodes))


def predicting(samples: Sequence[DocumentSample]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """int64 [K] each: positions whose logits predict a labelled token, those tokens, and the sample of each."""
    positions, targets, of = [], [], []
    at = 0
    for number, sample in enumerate(samples):
        at += sum(map(len, sample.documents))
        for ids, mask in sample.tails:
            learned = np.flatnonzero(mask)
            assert not len(learned) or learned[0] > 0, "the first token of a tail cannot be learned"
            positions.append(at + learned - 1)
            targets.append(ids[learned].astype(np.int64))
            of.append(np.full(len(learned), number))
            at += len(ids)
    return np.concatenate(positions), np.concatenate(targets), np.concatenate(of)


@dataclass(frozen=True)
class DocumentBatch:
    """One row of samples. `teacher` holds its "own" samples under the full mask."""

    graph: Graph
    index_K: Tensor
    targets_K: Tensor
    own_M: Tensor  # of the K positions
    teacher: Graph | None
    teacher_M: Tensor  # positions in the teacher's row

    def to(self, device: torch.device) -> DocumentBatch:
        """The same on a device."""
        index_K, targets_K, own_M, teacher_M = (
            x.to(device) for x in (self.index_K, self.targets_K, self.own_M, self.teacher_M)
        )
        return DocumentBatch(self.graph, index_K, targets_K, own_M, self.teacher, teacher_M)

    @classmethod
    def of(cls, samples: Sequence[DocumentSample], own: Sequence[bool], length: int = 0, pad: int = 0) -> DocumentBatch:
        """The batch of these samples, padded to `length` tokens."""
        index_K, targets_K, of_K = predicting(samples)
        own = [alone and bool(sample.documents) for alone, sample in zip(own, samples, strict=True)]
        own_M, teacher, teacher_M = np.flatnonzero(np.array(own)[of_K]), None, np.zeros(0, np.int64)
        taught = [sample for sample, alone in zip(samples, own, strict=True) if alone]
        if taught:
            rounded = -(-sum(map(len, taught)) // _TEACHER) * _TEACHER
            teacher, teacher_M = graph_of(taught, [False] * len(taught), rounded, pad), predicting(taught)[0]
        index_K, targets_K, own_M, teacher_M = map(torch.from_numpy, (index_K, targets_K, own_M, teacher_M))
        return cls(graph_of(samples, own, length, pad), index_K, targets_K, own_M, teacher, teacher_M)


@dataclass(frozen=True)
class DocumentBatches(Sequence[tuple[DocumentBatch]]):
    """Rows of `length` tokens, each filled with whole samples; `seed` decides which samples are "own"."""

    samples: Sequence[DocumentSample]
    rows: Sequence[Sequence[int]]
    length: int
    own: float
    seed: int
    pad: int = 0

    @classmethod
    def of(cls, samples: Sequence[DocumentSample], length: int, own: float, seed: int, pad: int = 0) -> DocumentBatches:
        """The rows of these samples, none of which may be longer than a row."""
        rows = best_fit([len(sample) for sample in samples], length)
        order = np.random.default_rng(seed).permutation(len(rows))
        return cls(samples, [rows[i] for i in order], length, own, seed, pad)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[DocumentBatch]:  # pyright: ignore[reportIncompatibleMethodOverride]
        members = [self.samples[i] for i in self.rows[index]]
        own = np.random.default_rng([self.seed, index]).random(len(members)) < self.own
        return (DocumentBatch.of(members, own.tolist(), self.length, self.pad),)


def logits_of(model: PreTrainedModel, graph: Graph, index_K: Tensor) -> Tensor:
    """Float32 logits [K, V] at the positions `index_K` of one row under the graph's mask."""
    hidden_TD = folder.hidden_of(model, graph, isolated=True)
    padded_K = F.pad(index_K, (0, -len(index_K) % _WIDTH))
    head, hidden_KD = head_of(model), hidden_TD.index_select(0, padded_K)
    return head.finish(F.linear(hidden_KD, head.weight_VD))[: len(index_K)].float()


def loss_function(model: PreTrainedModel, kl: float) -> Callable[[DocumentBatch], Loss]:
    """A function batch -> (loss, router balance, expert load [L, E], parts of the loss)."""
    routers = Routers.of(model)

    def compute(batch: DocumentBatch) -> Loss:
        teacher_MV = None
        if batch.teacher is not None:
            with torch.no_grad():
                teacher_MV = logits_of(model, batch.teacher, batch.teacher_M).log_softmax(-1)
        routers.clear()
        logits_KV = logits_of(model, batch.graph, batch.index_K)
        losses_K = F.cross_entropy(logits_KV, batch.targets_K, reduction="none")
        divergence = losses_K.new_zeros(())
        if teacher_MV is not None:
            student_MV = logits_KV.index_select(0, batch.own_M).log_softmax(-1)
            divergence = F.kl_div(student_MV, teacher_MV, reduction="sum", log_target=True) / len(losses_K)
        balance, load_LE = routers.balance(losses_K)
        parts = {"loss/kl": divergence.detach(), "batch/own": losses_K.new_tensor(len(batch.own_M) / len(losses_K))}
        return losses_K.mean() + kl * divergence, balance, load_LE, parts

    return compute


@torch.no_grad()
def measure(model: PreTrainedModel, samples: Sequence[DocumentSample], own: bool, length: int) -> dict[str, float]:
    """The figures of all answers under one mask: `nll`, nats per labelled token, and `exact`, the share that greedy
    decoding gives. Greedy decoding gives an answer exactly if each of its tokens is the likeliest after those before
    it."""
    nll, tokens, right, answers = 0.0, 0, 0, 0
    for row in best_fit([len(sample) for sample in samples], length):
        members = [samples[i] for i in row]
        index_K, targets_K, _ = (torch.from_numpy(x).to(model.device) for x in predicting(members))
        logits_KV = logits_of(model, graph_of(members, [own] * len(members), length), index_K)
        nll += float(F.cross_entropy(logits_KV, targets_K, reduction="sum"))
        tokens += len(targets_K)
        correct = (logits_KV.argmax(-1) == targets_K).split([int(mask.sum()) for s in members for _, mask in s.tails])
        right += sum(bool(answer.all()) for answer in correct)
        answers += len(correct)
    return {"nll": nll / tokens, "exact": right / answers}
