"""What this software computes of an architecture, and what it refuses by name: for the rows of a trainer, for shared
prompts (several rows in one pass), and for the engine.

`refusal` reads a configuration, before any process starts. `trial` compares log-probabilities of the loaded model with
transformers' own forward pass, for what no configuration tells: layers that ignore the layout, logits with a scale of
their own, keys of another size. Who loads a model asks both.

    trainer      refusal(config, "rows"), and "shared prompts" unless it computes row by row; `trainer.rl.trial`
    engine       refusal(config, "engine"); a trial by decode steps beside each other, `inference.engine`
    etude train  refusal for all that the run uses, from config.json alone
    doctor       the table of architectures (docs/models.md)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig, PreTrainedModel

from etude.models.head import head_of

Use = Literal["rows", "shared prompts", "engine"]
USES: tuple[Use, ...] = get_args(Use)

_ADVICE: dict[Use, str] = {
    "rows": "train another model",
    "shared prompts": 'set trainer.execution = "rows" (auto takes it by itself)',
    "engine": 'use inference.engine = "vllm"',
}
# By kind of layer, what is to say of it.
_STATE = "carry a state from token to token"
_SELECTS = "choose the keys that a query sees"
_CHUNKS = "see by chunks of positions"
_WINDOW = "see by distance"
_KINDS = {
    "linear_attention": _STATE,
    "conv": _STATE,
    "hybrid": _STATE,
    "mamba": _STATE,
    "recurrent": _STATE,
    "indexed_attention": _SELECTS,
    "compressed_sparse_attention": _SELECTS,
    "heavily_compressed_attention": _SELECTS,
    "chunked_attention": _CHUNKS,
    "sliding_attention": _WINDOW,
}
_PLAIN = {"full_attention", "attention", "mlp", "moe"}
_REFUSED: dict[Use, set[str]] = {
    "rows": {_SELECTS, _CHUNKS},
    "shared prompts": {_SELECTS, _CHUNKS, _STATE},
    "engine": {_SELECTS, _CHUNKS, _STATE},
}

BOUND = 6.0  # times the noise, in float32; measured up to 2.8, on smollm2, nano and 40 small models
LEAST = 2e-6  # nats: below it the noise of a few tokens is luck
LIMIT = 1e-3  # nats, float32, that a trial allows at least: its random ids are hard for a trained model
MOST = 1e-2  # nats that are ever called noise: a wrong mask is off by some tenths or more
LIMIT_NARROW = 0.1  # in narrower types, or `_NOISE` times what transformers' own two attentions differ by
_NOISE = 4.0
_ROUNDED = 2**-6  # of the largest logit: two roundings to bfloat16
FAILURES = (AttributeError, KeyError, IndexError, TypeError, ValueError, RuntimeError)
"""What a model of an unknown kind raises where it does not fit."""
_ROWS = (27, 20, 38)  # tokens of the trial's rows
_COMMON = 18  # of them equal
_WINDOW_TRIED = 8

LogProbs = Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]]
"""Rows of token ids [T] -> for each, float log-probabilities [T - 1] of its ids but the first, at temperature 1."""


def refusal(config: PretrainedConfig, use: Use) -> str:
    """Why a model of this configuration cannot be used so, with advice, in one sentence; "" if nothing is known
    against it."""
    if config.is_encoder_decoder:
        return f"{config.model_type} is an encoder-decoder: give a decoder, a causal language model"
    text = config.get_text_config()
    # What no row can be computed of is nothing to share, either.
    uses: tuple[Use, ...] = ("rows", use) if use == "shared prompts" else (use,)
    for asked in uses:
        for reason in _reasons(text, asked):
            return f"{text.model_type} {reason}: {_ADVICE[asked]}"
    return ""


def _reasons(text: PretrainedConfig, use: Use) -> Iterator[str]:
    if getattr(text, "attn_logit_softcapping", None):
        yield f"caps the scores of attention (attn_logit_softcapping); {_lacks(use)}"
    for kind in layer_kinds(text):
        what = _KINDS.get(kind, "" if kind in _PLAIN else "are not known here")
        if what and (what in _REFUSED[use] or (kind not in _KINDS and use != "rows")):
            yield f"has layers of the kind {kind}, which {what}; {_lacks(use)}"
    if use == "rows":
        return
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = {r.get("rope_type", "") for r in (rope, *rope.values()) if isinstance(r, dict)}
    if long := kinds & {"dynamic", "longrope"}:
        yield f"takes its rotary frequencies from the longest row of a pass ({long.pop()}); {_lacks(use)}"


def layer_kinds(config: PretrainedConfig) -> list[str]:
    """The kinds of a model's layers in transformers' words, sorted, each once. A window that is not named by layer
    counts as `sliding_attention`."""
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ())
    if not kinds and getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True):
        kinds = {"sliding_attention"}
    return sorted(kinds)


def _lacks(use: Use) -> str:
    return {
        "rows": "our trainer does not compute it",
        "shared prompts": "prompts cannot be shared exactly",
        "engine": "our engine does not compute it",
    }[use]


# --- by trial -------------------------------------------------------------------------------------------------------


def refused(model: PreTrainedModel, use: Use, error: Exception) -> str:
    """Why a model cannot be used so, in one sentence, after it has raised `error`, one of `FAILURES`."""
    name = model.config.get_text_config().model_type
    return f"{name} does not fit ({_first_line(error)}); {_lacks(use)}: {_ADVICE[use]}"


def trial_rows(vocab_size: int, seed: int = 0) -> list[np.ndarray]:
    """Rows of random ids for a trial: three of different lengths that begin alike."""
    noise = np.random.default_rng(seed)
    ids = noise.integers(0, vocab_size, (len(_ROWS), max(_ROWS)))
    ids[:, :_COMMON] = ids[0, :_COMMON]
    return [row[:length] for row, length in zip(ids, _ROWS, strict=True)]


def trial(model: PreTrainedModel, use: Use, ours: LogProbs, *, seed: int = 0) -> str:
    """Why log-probabilities that `ours` gives for three short rows are not those of transformers' own forward pass over
    each row, with its eager attention and experts; "" if they are. An error in `ours` is a reason, too. The sentence
    names the model and says what to do. Windows are narrowed meanwhile, to be shorter than the rows; afterwards the
    model is as it was."""
    with _narrow_windows(model):
        return _tried(model, use, ours, seed)


def _tried(model: PreTrainedModel, use: Use, ours: LogProbs, seed: int) -> str:
    name, narrow = model.config.get_text_config().model_type, model.dtype != torch.float32
    rows = trial_rows(model.config.get_text_config().vocab_size, seed)
    try:
        truth = [_reference(model, row) for row in rows]
    except FAILURES as e:
        return f"{name} has no forward pass to compare with ({_first_line(e)}); {_lacks(use)}: {_ADVICE[use]}"
    try:
        with torch.no_grad():
            given = [np.asarray(row) for row in ours(rows)]
        off = distance(given, truth)
        if narrow:
            limit = max(LIMIT_NARROW, _NOISE * distance([_reference(model, row, "sdpa") for row in rows], truth))
        elif model.device.type == "cpu":
            limit = max(LIMIT, bound(lambda rows: [plain_log_probs(model, row) for row in rows], rows, truth))
        else:
            limit = LIMIT
    except FAILURES as e:
        return f"{name} fails its trial ({_first_line(e)}); {_lacks(use)}: {_ADVICE[use]}"
    if off <= limit:  # not if it is no number
        return ""
    return (
        f"{name} differs from transformers' own forward pass by {off:.2g} nats in its trial, where {limit:.2g} are "
        f"allowed; {_lacks(use)}: {_ADVICE[use]}"
    )


class OtherOrder(TorchFunctionMode):
    """Inside, linear layers and products of matrices add up the second half of their terms before the first: the same
    function, with other roundings. What is written as `einsum` stays as it is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func is functional.linear:
            return _linear_in_halves(*args, **named)
        if func is torch.addmm and len(args) == 3 and not named:
            return args[0] + _in_halves(torch.mm, args[1], args[2])
        if func in _PRODUCTS and not named and args[0].shape[-1] > 1 and args[1].dim() > 1:
            return _in_halves(func, *args)
        return func(*args, **named)


_PRODUCTS = (torch.matmul, torch.bmm, torch.mm, Tensor.matmul, Tensor.bmm, Tensor.mm, Tensor.__matmul__)


def _linear_in_halves(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    half = input.shape[-1] // 2
    made = functional.linear(input[..., half:], weight[..., half:])
    made = made + functional.linear(input[..., :half], weight[..., :half]) if half else made
    return made if bias is None else made + bias


def _in_halves(product: Callable[[Tensor, Tensor], Tensor], left: Tensor, right: Tensor) -> Tensor:
    half = left.shape[-1] // 2
    return product(left[..., half:], right[..., half:, :]) + product(left[..., :half], right[..., :half, :])


def bound(plainly: LogProbs, rows: Sequence[np.ndarray], truth: Sequence[np.ndarray]) -> float:
    """How far log-probabilities in float32 may be from `truth`, in nats: `BOUND` times the noise. That is how far the
    forward pass `plainly`, which `truth` is from, is off in another order of summation. Logits of a large model are
    larger, and so is their noise: no constant fits all. Never more than `MOST`: where another order of sums chooses
    other experts, the noise says nothing."""
    with OtherOrder():
        noise = distance(plainly(rows), truth)
    return min(max(BOUND * noise, LEAST), MOST)


def distance(given: Sequence[np.ndarray], truth: Sequence[np.ndarray]) -> float:
    """The largest difference of two lists of arrays; not a number where one holds any. Raises ValueError for shapes
    that differ."""
    if [x.shape for x in given] != [x.shape for x in truth]:
        raise ValueError(f"{[x.shape for x in given]} log-probabilities instead of {[x.shape for x in truth]}")
    return float(np.max([np.abs(a.astype(np.float64) - b).max() for a, b in zip(given, truth, strict=True)]))


@torch.no_grad()
def plain_log_probs(model: PreTrainedModel, row: np.ndarray, attention: str = "eager") -> np.ndarray:
    """Log-probabilities [T - 1] of a row's ids but the first by the class's own forward pass: `attention` is one of
    transformers' implementations. Nothing of ours takes part in attention, experts or logits."""
    ids_1T = torch.from_numpy(row.astype(np.int64)).to(next(model.parameters()).device)[None]
    with plain(model, attention):
        logits_TV = model(input_ids=ids_1T, use_cache=False).logits[0]
    return _chosen(logits_TV, ids_1T[0])


@contextmanager
def plain(model: PreTrainedModel, attention: str = "eager") -> Iterator[None]:
    """Inside, the model runs transformers' own attention and experts."""
    configs = {id(c): c for m in (model, *model.modules()) if (c := getattr(m, "config", None))}
    names = "_attn_implementation_internal", "_experts_implementation_internal"
    kept = [(config, name, getattr(config, name, None)) for config in configs.values() for name in names]
    try:
        for config, name, _ in kept:
            setattr(config, name, attention if name == names[0] else "eager")
        yield
    finally:
        for config, name, value in kept:
            setattr(config, name, value)


@contextmanager
def _narrow_windows(model: PreTrainedModel) -> Iterator[None]:
    """Inside, sliding windows are of `_WINDOW_TRIED` tokens, in the configurations and in the layers that keep them."""
    owners: dict[int, Any] = {
        id(o): o for m in (model, *model.modules()) for o in (m, getattr(m, "config", None)) if o is not None
    }
    windows: list[tuple[Any, int]] = [
        (o, w) for o in owners.values() if isinstance(w := getattr(o, "sliding_window", None), int)
    ]
    try:
        for owner, window in windows:
            owner.sliding_window = min(window, _WINDOW_TRIED)
        yield
    finally:
        for owner, window in windows:
            owner.sliding_window = window


@torch.no_grad()
def _reference(model: PreTrainedModel, row: np.ndarray, attention: str = "eager") -> np.ndarray:
    """`plain_log_probs`; of a narrow model with logits in float32, which its class rounds by more than is looked for.
    Raises ValueError if `head_of` gives other logits than the class."""
    seen: list[Tensor] = []
    embeddings: Any = model.get_output_embeddings()
    if embeddings is None:
        raise ValueError("it has no output embeddings")
    handle = embeddings.register_forward_pre_hook(lambda _module, given: seen.append(given[0]))
    ids_1T = torch.from_numpy(row.astype(np.int64)).to(next(model.parameters()).device)[None]
    try:
        with plain(model, attention):
            logits_TV = model(input_ids=ids_1T, use_cache=False).logits[0]
    finally:
        handle.remove()
    if len(seen) != 1:
        raise ValueError("its logits are not made by its output embeddings")
    ours_TV = head_of(model).logits(seen[0].reshape(-1, seen[0].shape[-1]))
    narrow = model.dtype != torch.float32
    allowed = _ROUNDED * max(1.0, float(logits_TV.abs().max())) if narrow else LIMIT
    if not float((ours_TV - logits_TV.float()).abs().max()) <= allowed:
        raise ValueError("it changes its logits in a way that is not known")
    return _chosen(ours_TV if narrow else logits_TV, ids_1T[0])


def _chosen(logits_TV: Tensor, ids_T: Tensor) -> np.ndarray:
    logprobs_TV = torch.log_softmax(logits_TV[:-1].float(), dim=-1)
    return logprobs_TV.gather(1, ids_T[1:, None]).squeeze(1).cpu().numpy()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
