"""The architectures that this software computes, for the rows of a trainer, for shared prompts (several rows in one
pass) and for the engine. All others are refused by name.

`refusal` reads a configuration, before any process starts. `trial` compares log-probabilities of the loaded model with
transformers' own forward pass, for properties that no configuration tells: layers that ignore the layout, logits with a
scale of their own, keys of another size. Code that loads a model calls both.

    trainer      refusal(config, "rows"), and "shared prompts" unless it computes row by row; `trainer.rl.trial`
    engine       refusal(config, "engine"); a trial by decode steps beside each other, `inference.engine`
    etude train  refusal for all uses in the run, from config.json alone
    doctor       the table of architectures (docs/models.md)
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig, PreTrainedModel

from etude.config import MeshConfig
from etude.errors import first_line
from etude.models.dtypes import computing_dtype
from etude.models.head import head_of
from etude.models.key_values import positions
from etude.models.lengths import lengths, shortened
from etude.models.text_models import auto_class, keep_text

Use = Literal["rows", "shared prompts", "engine"]
USES: tuple[Use, ...] = get_args(Use)

_ADVICE: dict[Use, str] = {
    "rows": "train another model",
    "shared prompts": 'set trainer.execution = "rows" (auto takes it by itself)',
    "engine": 'use inference.engine = "vllm"',
}
# Kinds of layers, with the reason of a refusal.
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
_ALONE = "ranks cannot compute its rows together: set trainer.mesh.context to 1"
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")  # keys of their number
_SEES = "is an encoder, whose tokens see those behind them: give a causal language model"
_CAUSAL = re.compile(r"CausalLM|LMHead")
_OTHER_HEADS = ("classifier", "summary")
_NOISY = re.compile(r"dropout|pdrop|jitter|layerdrop")
_PLAIN = {"full_attention", "attention", "mlp", "moe"}
_REFUSED: dict[Use, set[str]] = {
    "rows": {_SELECTS, _CHUNKS},
    "shared prompts": {_SELECTS, _CHUNKS, _STATE},
    "engine": {_SELECTS, _CHUNKS, _STATE},
}

BOUND = 6.0  # times the noise, in float32; measured up to 2.8, on smollm2, nano and 40 small models
LEAST = 2e-6  # nats; below it the noise of a few tokens is chance
LIMIT = 1e-3  # nats, float32; the least bound of a trial, whose random ids are hard for a trained model
MOST = 1e-2  # nats; the largest bound: a wrong mask differs by some tenths or more
LIMIT_NARROW = 0.1  # nats in narrower types, or `_NOISE` times the difference of transformers' own two attentions
_NOISE = 4.0
_ROUNDED = 2**-6  # share of the largest logit: two roundings to bfloat16
FAILURES = (AttributeError, KeyError, IndexError, TypeError, ValueError, RuntimeError)
"""The errors of a model whose kind is not supported."""
_ROWS = (27, 20, 38)  # tokens of the trial's rows
_COMMON = 18  # length of their common prefix
_SHORT, _SECOND, _REACH = 8, 72, 256  # tokens: lengths of a short row; the least and the most that a long row crosses
_TOKENS, _LARGE = 20_000_000_000, 2_000_000_000  # parameters times tokens of a long row; parameters, on a CPU
_MEDIA = re.compile(r"^(image|video|audio|vision|boi|eoi|boa|eoa)\w*token\w*$|^(boi|eoi|boa|eoa)_")

Rows = list[np.ndarray]
"""Token ids [T] of each row."""

LogProbs = Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]]
"""Rows of token ids [T] -> for each, float log-probabilities [T - 1] of its ids after the first, at temperature 1."""


def refusal(config: PretrainedConfig, use: Use) -> str:
    """The reason why a model of this configuration cannot be used so, with advice, in one sentence; "" without a
    reason."""
    if config.is_encoder_decoder:
        return f"{config.model_type} is an encoder-decoder: give a decoder, a causal language model"
    text = config.get_text_config()
    named = config.architectures or []
    encoder = getattr(text, "is_decoder", None) is False and named and not any(_CAUSAL.search(name) for name in named)
    if encoder or getattr(text, "use_bidirectional_attention", None) is True:
        return f"{text.model_type} {_SEES}"
    # A model whose rows cannot be computed cannot share prompts, either.
    needed: tuple[Use, ...] = ("rows", use) if use == "shared prompts" else (use,)
    for each in needed:
        for reason in _reasons(text, each):
            return f"{text.model_type} {reason}: {_ADVICE[each]}"
    return ""


def context_refusal(config: PretrainedConfig, ranks: int) -> str:
    """The reason why so many ranks cannot compute a row of this model together (`models.context_parallel`), with
    advice, in one sentence; "" without a reason."""
    text = config.get_text_config()
    if ranks == 1:
        return ""
    for kind in layer_kinds(text):
        if (what := _KINDS.get(kind, "" if kind in _PLAIN else "are not known here")) and what != _WINDOW:
            return f"{text.model_type} has layers of the kind {kind}, which {what}; {_ALONE}"
    if long := _by_length(text):
        return f"{text.model_type} takes its rotary frequencies from the longest row of a pass ({long}); {_ALONE}"
    try:
        heads = getattr(text, "num_attention_heads", None)
    except RuntimeError:  # transformers' error for a value that differs from layer to layer
        heads = None
    if not isinstance(heads, int):
        return f"{text.model_type} has no one number of attention heads; {_ALONE}"
    if heads % ranks:
        fits = max(n for n in range(1, ranks) if heads % n == 0)
        return (
            f"{text.model_type} has {heads} attention heads, which {ranks} ranks do not divide: set "
            f"trainer.mesh.context to {fits}"
        )
    return ""


def _by_length(text: PretrainedConfig) -> str:
    """The kind of rotary frequencies that depend on the longest row of a pass; "" if they do not."""
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = {r.get("rope_type", "") for r in (rope, *rope.values()) if isinstance(r, dict)}
    return next(iter(sorted(kinds & {"dynamic", "longrope"})), "")


def _reasons(text: PretrainedConfig, use: Use) -> Iterator[str]:
    if getattr(text, "attn_logit_softcapping", None):
        yield f"caps the scores of attention (attn_logit_softcapping); {_lacks(use)}"
    for kind in layer_kinds(text):
        what = _KINDS.get(kind, "" if kind in _PLAIN else "are not known here")
        if what and (what in _REFUSED[use] or (kind not in _KINDS and use != "rows")):
            yield f"has layers of the kind {kind}, which {what}; {_lacks(use)}"
    if use == "rows":
        return
    if long := _by_length(text):
        yield f"takes its rotary frequencies from the longest row of a pass ({long}); {_lacks(use)}"


def mesh_refusal(config: PretrainedConfig, mesh: MeshConfig) -> str:
    """The reason why a model of this configuration cannot be divided so over ranks, with advice, in one sentence; ""
    without a reason. transformers divides the modules that its plans name, and leaves others whole in silence."""
    if mesh.ranks == 1:
        return ""
    text = config.get_text_config()
    key, experts = f"trainer.mesh.expert = {mesh.expert}", next((n for k in _EXPERTS if (n := getattr(text, k, 0))), 0)
    if mesh.expert > 1 and not experts:
        return f"{text.model_type} has no experts: drop {key}"
    if experts % mesh.expert:
        return f"{key} must divide the {experts} experts of {text.model_type}"
    ranks = mesh.shard * mesh.context
    of_one, parts = experts // mesh.expert, ranks // mesh.expert
    if experts and -(-of_one // parts) * (parts - 1) >= of_one:  # transformers' loader fails on such a rank alone
        return (
            f"of {ranks} ranks some would have none of its {experts} experts: make trainer.mesh.shard x context a "
            "divisor of their number"
        )
    with torch.device("meta"):
        model: Any = auto_class(config).from_config(config)
    keep_text(model)
    names = {re.sub(r"\.\d+(?=\.|$)", ".*", name) for name, _ in model.named_modules()}
    layers = next((n for n, m in model.named_modules() if m is getattr(model.get_decoder(), "layers", None)), "?")
    if f"{layers}.*" not in model.fsdp_plan:
        return f"transformers has no plan for dividing the layers of {text.model_type}: drop trainer.mesh"
    if mesh.expert > 1 and "ep_dispatch_experts" not in [v for k, v in model.ep_plan.items() if k in names]:
        return f"transformers has no plan for dividing the experts of {text.model_type}: drop {key}"
    return context_refusal(config, mesh.context)


def layer_kinds(config: PretrainedConfig) -> list[str]:
    """The kinds of a model's layers by transformers' names, sorted, each once. A window without names of layers counts
    as `sliding_attention`."""
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ())
    if not kinds and getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True):
        kinds = {"sliding_attention"}
    return sorted(kinds)


def noises(model: PreTrainedModel) -> list[str]:
    """The keys of the configuration that name dropout or noise of routers, if it is not 0."""
    text = model.config.get_text_config().to_dict()
    return [
        k
        for k, v in sorted(text.items())
        if _NOISY.search(k) and not k.startswith(_OTHER_HEADS) and isinstance(v, int | float) and v > 0
    ]


def say_noise(model: PreTrainedModel) -> None:
    """Prints a note if the configuration has dropout or noise of routers. Stages train in evaluation mode, the model
    that is served: noise would move the log-probabilities of what was sampled by some tenths of a nat."""
    if keys := noises(model):
        print(f"note: trained as it is served, without {', '.join(keys)} of config.json", file=sys.stderr, flush=True)


def _lacks(use: Use) -> str:
    return {
        "rows": "our trainer does not compute it",
        "shared prompts": "prompts cannot be shared exactly",
        "engine": "our engine does not compute it",
    }[use]


# --- by trial -------------------------------------------------------------------------------------------------------


def refused(model: PreTrainedModel, use: Use, error: Exception) -> str:
    """The reason why a model cannot be used so, in one sentence, after it has raised `error`, one of `FAILURES`."""
    name = model.config.get_text_config().model_type
    return f"{name} does not fit ({first_line(error)}); {_lacks(use)}: {_ADVICE[use]}"


def text_ids(config: PretrainedConfig) -> np.ndarray:
    """The ids of a vocabulary but those that stand for images or sound, which a multimodal class replaces."""
    media = [v for k, v in config.to_dict().items() if _MEDIA.search(k) and isinstance(v, int)]
    return np.setdiff1d(np.arange(config.get_text_config().vocab_size), media)


def trial_rows(config: PretrainedConfig, seed: int = 0, most: int = 2**31, lengths: Sequence[int] = _ROWS) -> Rows:
    """Rows of random ids for a trial: of different `lengths`, at most `most` tokens each, with a common
    prefix."""
    noise, known = np.random.default_rng(seed), text_ids(config)
    ids = known[noise.integers(0, len(known), (len(lengths), max(lengths)))]
    ids[:, :_COMMON] = ids[0, :_COMMON]
    return [row[: min(length, most)] for row, length in zip(ids, lengths, strict=True)]


def long_rows(model: PreTrainedModel, seed: int = 0, most: int = 2**31) -> tuple[int, Rows]:
    """Rows that are longer than the model's lengths (`lengths`), or than the number of tokens that is returned if these
    are longer. No rows for a model without lengths, and for one whose trial would take more than some seconds."""
    beyond = [length for length in lengths(model.config) if length > _SHORT]
    size = sum(p.numel() for p in model.parameters())
    if not beyond or (model.device.type == "cpu" and size > _LARGE):
        return 0, []
    reach = min(max(beyond), max(_SECOND, min(_REACH, _TOKENS // size)))
    rows = trial_rows(model.config, seed, most, (reach + 9, reach + 23))
    return reach, rows if min(map(len, rows)) > reach else []


def trial(model: PreTrainedModel, use: Use, ours: LogProbs, *, seed: int = 0, most: int | None = None) -> str:
    """The reason why the log-probabilities of `ours` differ from those of transformers' own forward pass, with its
    eager attention and experts, on three short rows and, in models with windows and other lengths, on two longer ones;
    "" if they agree. An error in `ours` is a reason, too. The sentence names the model and gives advice. Lengths are
    shortened meanwhile, so that rows cross them; afterwards the model is as before. `most` bounds the tokens of a
    row."""
    most = min(most or 2**31, positions(model.config))
    reach, rows = long_rows(model, seed, most)
    for shortest, tried in ((_SHORT, trial_rows(model.config, seed, most)), (reach, rows)):
        with shortened(model, shortest):
            if tried and (why := _tried(model, use, ours, tried)):
                return why
    return ""


def _tried(model: PreTrainedModel, use: Use, ours: LogProbs, rows: Rows) -> str:
    name, narrow = model.config.get_text_config().model_type, computing_dtype(model) != torch.float32
    try:
        truth = [_reference(model, row) for row in rows]
    except FAILURES as e:
        return f"{name} has no forward pass to compare with ({first_line(e)}); {_lacks(use)}: {_ADVICE[use]}"
    seen = min(_COMMON, *map(len, rows)) - 1
    if not distance([row[:seen] for row in truth[1:]], [truth[0][:seen]] * (len(rows) - 1)) <= (
        LIMIT_NARROW if narrow else LIMIT
    ):
        return f"{name} {_SEES}"
    try:
        with torch.no_grad():
            log_probs = [np.asarray(row) for row in ours(rows)]
        off = distance(log_probs, truth)
        if narrow:
            limit = max(LIMIT_NARROW, _NOISE * distance([_reference(model, row, "sdpa") for row in rows], truth))
        elif model.device.type == "cpu":
            limit = max(LIMIT, bound(lambda rows: [plain_log_probs(model, row) for row in rows], rows, truth))
        else:
            limit = LIMIT
    except FAILURES as e:
        return f"{name} fails its trial ({first_line(e)}); {_lacks(use)}: {_ADVICE[use]}"
    if off <= limit:  # false for NaN
        return ""
    return (
        f"{name} differs from transformers' own forward pass by {off:.2g} nats in its trial, where {limit:.2g} are "
        f"allowed; {_lacks(use)}: {_ADVICE[use]}"
    )


class OtherOrder(TorchFunctionMode):
    """A context in which linear layers and matrix products sum the second half of their terms before the first: the
    same function, with other roundings. `einsum` is not changed."""

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
    """The allowed difference of float32 log-probabilities from `truth`, in nats: `BOUND` times the noise, at most
    `MOST`. The noise is the difference of the forward pass `plainly`, which computed `truth`, in another order of
    summation. It grows with the logits of larger models, so no constant fits all. Beyond `MOST`, another order of sums
    has chosen other experts."""
    with OtherOrder():
        noise = distance(plainly(rows), truth)
    return min(max(BOUND * noise, LEAST), MOST)


def distance(log_probs: Sequence[np.ndarray], truth: Sequence[np.ndarray]) -> float:
    """The largest difference of two lists of arrays; NaN if one contains NaN. Raises ValueError for shapes that
    differ."""
    if [x.shape for x in log_probs] != [x.shape for x in truth]:
        raise ValueError(f"{[x.shape for x in log_probs]} log-probabilities instead of {[x.shape for x in truth]}")
    return float(np.max([np.abs(a.astype(np.float64) - b).max() for a, b in zip(log_probs, truth, strict=True)]))


@torch.no_grad()
def plain_log_probs(model: PreTrainedModel, row: np.ndarray, attention: str = "eager") -> np.ndarray:
    """Log-probabilities [T - 1] of a row's ids after the first by the class's own forward pass. `attention` is one of
    transformers' implementations. None of our attention, experts or logits is used."""
    ids_1T = torch.from_numpy(row.astype(np.int64)).to(next(model.parameters()).device)[None]
    with plain(model, attention):
        logits_TV = model(input_ids=ids_1T, use_cache=False).logits[0]
    return _chosen(logits_TV, ids_1T[0])


@contextmanager
def plain(model: PreTrainedModel, attention: str = "eager") -> Iterator[None]:
    """A context in which the model runs transformers' own attention and experts."""
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


@torch.no_grad()
def _reference(model: PreTrainedModel, row: np.ndarray, attention: str = "eager") -> np.ndarray:
    """`plain_log_probs`; for a narrow model with float32 logits, since its class rounds them by more than the trial's
    limit. Raises ValueError if `head_of` gives other logits than the class."""
    seen: list[Tensor] = []
    embeddings: Any = model.get_output_embeddings()
    if embeddings is None:
        raise ValueError("it has no output embeddings")
    handle = embeddings.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    ids_1T = torch.from_numpy(row.astype(np.int64)).to(next(model.parameters()).device)[None]
    try:
        with plain(model, attention):
            logits_TV = model(input_ids=ids_1T, use_cache=False).logits[0]
    finally:
        handle.remove()
    if len(seen) != 1:
        raise ValueError("its logits are not made by its output embeddings")
    ours_TV = head_of(model).logits(seen[0].reshape(-1, seen[0].shape[-1]))
    narrow = computing_dtype(model) != torch.float32
    allowed = _ROUNDED * max(1.0, float(logits_TV.abs().max())) if narrow else LIMIT
    if not float((ours_TV - logits_TV.float()).abs().max()) <= allowed:
        raise ValueError("it changes its logits in a way that is not known")
    return _chosen(ours_TV if narrow else logits_TV, ids_1T[0])


def _chosen(logits_TV: Tensor, ids_T: Tensor) -> np.ndarray:
    logprobs_TV = torch.log_softmax(logits_TV[:-1].float(), dim=-1)
    return logprobs_TV.gather(1, ids_T[1:, None]).squeeze(1).cpu().numpy()
