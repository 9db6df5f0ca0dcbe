"""A model that keeps its weights as vLLM does, stacked, with a loader that knows where they go.

With several workers it is one of them, as tensor parallelism divides a model: rows of the padded vocabulary, heads of
queries, all heads of keys and values (there are fewer heads than workers), rows of gates and ups, columns of the
outputs and of what goes down; the norm is on all.
"""

from collections.abc import Iterable, Iterator

import torch

Pairs = Iterable[tuple[str, torch.Tensor]]
HEADS = {"q": 6, "k": 3, "v": 3}
EXPERTS, INNER, WIDTH, WORDS, PADDED = 3, 4, 6, 10, 16


class Stacked(torch.nn.Module):
    """`load_weights` takes the names of a checkpoint, one expert at a time or all in one tensor."""

    def __init__(self, seed: int | None = None, rank: int = 0, count: int = 1):
        super().__init__()
        self.rank, self.count = rank, count
        queries, inner = HEADS["q"] // count, INNER // count
        shapes = {
            "words": (PADDED // count, WIDTH),
            "qkv": (queries + HEADS["k"] + HEADS["v"], WIDTH),
            "o": (WIDTH, queries),
            "w13": (EXPERTS, 2 * inner, WIDTH),
            "w2": (EXPERTS, WIDTH, inner),
            "norm": (WIDTH,),
        }
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16), False))
        if seed is not None:
            self.load_weights(checkpoint(seed).items())

    def load_weights(self, weights: Pairs) -> set[str]:
        loaded: set[str] = set()
        for name, tensor in weights:
            for there, part in self._places(name, tensor):
                there.copy_(part)
            loaded.add(name)
        return loaded

    def _own(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """This worker's slice."""
        return tensor.chunk(self.count, dim)[self.rank]

    def _places(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        kind, _, rest = name.partition(".")
        inner, queries = INNER // self.count, HEADS["q"] // self.count
        if kind == "experts" and rest == "gate_up":
            for e in range(EXPERTS):
                for half, part in enumerate(tensor[e].chunk(2)):
                    yield self.w13.data[e, half * inner : (half + 1) * inner], self._own(part, 0)
        elif kind == "experts" and rest == "down":
            for e in range(EXPERTS):
                yield self.w2.data[e], self._own(tensor[e], 1)
        elif kind == "experts":
            number, _, which = rest.partition(".")
            if which == "down":
                yield self.w2.data[int(number)], self._own(tensor, 1)
            else:
                start = 0 if which == "gate" else inner
                yield self.w13.data[int(number), start : start + inner], self._own(tensor, 0)
        elif kind == "q":
            yield self.qkv.data[:queries], self._own(tensor, 0)
        elif kind in ("k", "v"):
            start = queries + (HEADS["k"] if kind == "v" else 0)
            yield self.qkv.data[start : start + HEADS[kind]], tensor
        elif kind == "o":
            yield self.o.data, self._own(tensor, 1)
        elif kind == "words":
            size = PADDED // self.count
            own = tensor[self.rank * size : (self.rank + 1) * size]
            yield self.words.data[: own.shape[0]], own
        elif kind == "norm":
            yield self.norm.data, tensor
        else:
            raise KeyError(name)


def checkpoint(seed: int) -> dict[str, torch.Tensor]:
    """What the trainer publishes: experts in one tensor."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "words": (WORDS, WIDTH),
        "experts.gate_up": (EXPERTS, 2 * INNER, WIDTH),
        "experts.down": (EXPERTS, WIDTH, INNER),
        **{name: (rows, WIDTH) for name, rows in HEADS.items()},
        "o": (WIDTH, HEADS["q"]),
        "norm": (WIDTH,),
    }
    return {name: torch.randn(shape, generator=generator).to(torch.bfloat16) for name, shape in shapes.items()}


def files(seed: int) -> dict[str, torch.Tensor]:
    """The same as a folder holds it: one tensor per expert and half."""
    tensors = checkpoint(seed)
    stacked, down = tensors.pop("experts.gate_up"), tensors.pop("experts.down")
    for e in range(EXPERTS):
        tensors[f"experts.{e}.gate"], tensors[f"experts.{e}.up"] = (part.clone() for part in stacked[e].chunk(2))
        tensors[f"experts.{e}.down"] = down[e].clone()
    return tensors
