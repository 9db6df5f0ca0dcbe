"""A model that keeps its weights as vLLM does, stacked, with a loader that knows where they go."""

from collections.abc import Iterable, Iterator

import torch

Pairs = Iterable[tuple[str, torch.Tensor]]
PARTS = {"q": slice(0, 6), "k": slice(6, 9), "v": slice(9, 12)}
EXPERTS, INNER, WIDTH, WORDS, PADDED = 3, 4, 6, 10, 16


class Stacked(torch.nn.Module):
    """`load_weights` takes the names of a checkpoint, one expert at a time or all in one tensor."""

    def __init__(self, seed: int | None = None):
        super().__init__()
        shapes = {"words": (PADDED, WIDTH), "qkv": (12, WIDTH), "w13": (EXPERTS, 2 * INNER, WIDTH), "norm": (WIDTH,)}
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

    def _places(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        kind, _, rest = name.partition(".")
        if kind == "experts" and rest == "gate_up":
            for e in range(EXPERTS):
                for half, part in enumerate(tensor[e].chunk(2)):
                    yield self.w13.data[e, half * INNER : (half + 1) * INNER], part
        elif kind == "experts":
            number, _, which = rest.partition(".")
            start = 0 if which == "gate" else INNER
            yield self.w13.data[int(number), start : start + INNER], tensor
        elif kind in PARTS:
            yield self.qkv.data[PARTS[kind]], tensor
        elif kind == "words":
            yield self.words.data[: tensor.shape[0]], tensor
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
        **{name: (part.stop - part.start, WIDTH) for name, part in PARTS.items()},
        "norm": (WIDTH,),
    }
    return {name: torch.randn(shape, generator=generator).to(torch.bfloat16) for name, shape in shapes.items()}


def files(seed: int) -> dict[str, torch.Tensor]:
    """The same as a folder holds it: one tensor per expert and half."""
    tensors = checkpoint(seed)
    stacked = tensors.pop("experts.gate_up")
    for e in range(EXPERTS):
        tensors[f"experts.{e}.gate"], tensors[f"experts.{e}.up"] = (part.clone() for part in stacked[e].chunk(2))
    return tensors
