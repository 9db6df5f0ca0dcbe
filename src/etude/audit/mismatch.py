"""`etude doctor mismatch RUN`: why the log-probabilities of trainer and engine differ in a run.

    exact checks     lengths, masks and versions of the tokens; infrastructure failures that were scored
    tagged version   every token scored again under the version that it names: the rest is not staleness
    suppositions     one thing changed at a time: weights of another version, one stale tensor, another temperature or
                     top-p, a bfloat16 head, keys and values of an older version under the prompt, altered tokens,
                     the recorded experts instead of the trainer's own or the other way round
    staleness        the same tokens under the version that trained on them, less the first

The verdict is the first exact check that fails, else the supposition that explains the difference, else staleness, if
the difference consists of staleness. The engine draws tokens from counters, so whether a token is the one that its
seed draws is evidence too. A token is scored only if all sampled tokens before it are of its version: swaps in the
middle of an episode leave older keys and values behind on purpose, which is part of staleness.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from etude import runfolder
from etude.audit.rescoring import Keys, VersionPiece, chosen, logits, route_flips, set_weights
from etude.config import RLConfig
from etude.errors import UserError
from etude.harness import turn_seed
from etude.inference.engine.sampling import sample
from etude.models.dtypes import computed_dtype
from etude.models.loading import load_model, named_tensors
from etude.models.router_replay import routers, shape
from etude.records import Episode, StopReason, decode
from etude.store import Store, open_store
from etude.trainer.rl.batch import document_fault, recorded_routes
from etude.weights import manifests
from etude.weights.adapters import load_live

FLOOR = {"float32": 1e-9, "bfloat16": 3e-4}
"""k2 that rounding leaves between engine and trainer: 1e-12 and 1e-4 were measured on the bundled model."""

EXPLAINED = 0.25  # a supposition explains a difference if at most this share of its k2 remains
WRONG_DRAWS = 0.02  # share of tokens that differ from the draw of their seed; rounding near an edge gives under .001
OLDER = 8  # versions before the tagged one that are tried
TENSOR_PIECES = 6  # pieces on which every tensor is tried
ACTIONS = {
    "healthy": "nothing to do",
    "infra": "such episodes must end as Outcome.INFRA: look at the logs of the sandbox and the engine",
    "tokens": "look at the harness and the sampling parameters of the engine",
    "weights": "look at the weight sync: engines must serve the digest of the manifest",
    "cache": "clear the engine's prefix cache at a swap, or key it by version",
    "routing": "set trainer.router_replay = true; engines must record (--routes), and ids stay with their tokens",
    "kernel": "compare precisions and kernels of engine and trainer: head, dtype, attention",
    "staleness": "lower rollout.staleness or trainer.lr, or use a preset with a correction",
}


@dataclass(frozen=True)
class Supposition:
    """A possible cause, and the k2 that remains if it is the cause."""

    cause: str
    what: str
    k2: float


@dataclass(frozen=True)
class Diagnosis:
    """The verdict: a cause, a sentence, and the figures behind it."""

    cause: str
    sentence: str
    action: str
    tokens: int = 0
    k2_tagged: float = 0.0  # under the version that a token names
    k2_trained: float = 0.0  # under the version that trained on it
    wrong_draws: float = 0.0
    shares: dict[str, float] = field(default_factory=dict)  # of the variance of the difference in training
    flips: float | None = None
    suppositions: tuple[Supposition, ...] = ()


def diagnose(run: Path, *, pieces: int = 24) -> Diagnosis:
    """The cause of the mismatch in a run folder, from its newest episodes. Raises UserError if it holds none."""
    config = runfolder.load_config(run)
    root = config.store or str(run)
    rollouts, weights = open_store(f"{root}/rollouts"), open_store(f"{root}/weights")
    # Of the last training episodes; evaluations lie in folders of their own.
    keys = sorted(key for key in rollouts.list() if key.split("/", 1)[0].isdigit())[-8 * pieces :]
    episodes = [decode(rollouts.get(key), Episode) for key in keys]
    if not episodes:
        raise UserError(f"{run} holds no episodes; let the run play some first")
    model = load_model(config.model.path, dtype=getattr(torch, config.trainer.dtype), device=config.trainer.device)
    experts = shape(model) if routers(model) else None
    replays = config.trainer.router_replay and experts is not None
    for cause, sentence in _exact(episodes, model.config.get_text_config().vocab_size, replays):
        return Diagnosis(cause, sentence, ACTIONS[cause])
    published = {m.version: m for m in manifests(weights)}
    pieces_tried = [p for e in reversed(episodes) for p in _pieces(e, experts) if p.version in published][:pieces]
    if not pieces_tried:
        raise UserError(f"{run} holds no episode whose tokens name a published version; is {root} its store?")
    trained_from = {group: m.version - 1 for m in published.values() for group in m.groups}
    return _Case(config, model, weights, pieces_tried, trained_from, sorted(published)).diagnosis()


def _exact(episodes: Sequence[Episode], vocabulary: int, replays: bool) -> Iterable[tuple[str, str]]:
    """Checks that need no weights; the first failure is the verdict. `replays`: expert ids must be there."""
    for e in episodes:
        for segment in e.segments:
            ids_T, mask_T, logprobs_T, versions_T = segment.arrays()
            at_N = np.flatnonzero(mask_T) if len(mask_T) == len(ids_T) else np.zeros(0, np.int64)
            wrong = (
                "token arrays of different lengths"
                if not len(ids_T) == len(mask_T) == len(logprobs_T) == len(versions_T)
                else "sampled tokens in its prompt"
                if mask_T[: segment.prompt_length].any()
                else "ids outside the vocabulary"
                if len(ids_T) and not 0 <= ids_T.min() <= ids_T.max() < vocabulary
                else "ids or positions other than those that were sampled, by their digest"
                if not segment.intact
                else "a mask that does not fit its log-probabilities and versions"
                if (logprobs_T[at_N] > 0).any() or (versions_T[at_N] < 0).any() or (versions_T[mask_T == 0] >= 0).any()
                else document_fault(segment)
            )
            if wrong:
                yield "tokens", f"episode {e.id} has {wrong}"
    bare = [e for e in episodes if any(s.routes is None for s in e.segments)] if replays else []
    if bare:
        yield (
            "routing",
            f"{len(bare)} of {len(episodes)} episodes, e.g. {bare[0].id}, carry no expert ids, so the trainer took its "
            "own experts: router replay was dropped",
        )
    failed = [e for e in episodes if not e.outcome.lost and (e.stop_reason is StopReason.ERROR or not e.sampled_tokens)]
    if failed:
        yield (
            "infra",
            f"{len(failed)} of {len(episodes)} episodes were lost to infrastructure and scored all the same, "
            f"e.g. {failed[0].id} with reward {failed[0].reward:g}: {failed[0].detail or 'it sampled nothing'}",
        )


def _pieces(e: Episode, experts: tuple[int, int] | None = None) -> Iterable[VersionPiece]:
    """The leading tokens of each segment that one version sampled; `experts`: a model's MoE layers and K."""
    turns = 0
    for segment in e.segments:
        ids_T, mask_T, logprobs_T, versions_T = segment.arrays()
        at_N = np.flatnonzero(mask_T)
        starts = np.array(segment.turn_starts, np.int64)
        turn_N = turns + np.maximum(np.searchsorted(starts, at_N, side="right") - 1, 0)
        turns += len(starts)
        other = np.flatnonzero(versions_T[at_N] != versions_T[at_N[:1]]) if len(at_N) else np.zeros(0, np.int64)
        n = int(other[0]) if len(other) else len(at_N)
        if n:
            seeds = np.array([turn_seed(e.seed, int(turn)) for turn in turn_N[:n]], np.int64)
            length = int(at_N[n - 1]) + 1
            recorded = segment.routes is not None
            yield VersionPiece(
                episode=e.id,
                group=e.group_id,
                version=int(versions_T[at_N[0]]),
                ids_T=ids_T[:length].copy(),
                prompt_length=segment.prompt_length,
                at_N=at_N[:n],
                recorded_N=logprobs_T[at_N[:n]].astype(np.float64),
                seed_N=seeds,
                routes_TLK=recorded_routes(segment, length, experts) if recorded and experts else None,
                documents=tuple(document.length for document in segment.documents),
            )


def _k2(differences: Sequence[np.ndarray]) -> float:
    d = np.concatenate(differences) if differences else np.zeros(0)
    return float(np.square(np.clip(d, -5, 5)).mean() / 2) if len(d) else 0.0


@dataclass
class _Case:
    """The pieces of a run, with its model and the weights of its versions."""

    config: RLConfig
    model: PreTrainedModel
    weights: Store
    pieces: list[VersionPiece]
    trained_from: Mapping[int, int]  # group -> version whose weights were trained
    published: list[int]
    _loaded: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._base = {name: t.clone() for name, t in named_tensors(self.model).items()}

    def tensors(self, version: int) -> dict[str, Tensor]:
        if version not in self._loaded:
            self._loaded[version] = load_live(self.weights, version, self._base)[1].tensors()
        return self._loaded[version]

    @property
    def engine_dtype(self) -> str:
        """The dtype of the engine's computation: "float32" or "bfloat16"."""
        options = self.config.inference
        dtype = computed_dtype(options.dtype, options.device, Path(self.config.model.path))
        return "float32" if dtype == torch.float32 else "bfloat16"

    @property
    def replays(self) -> bool:
        """Whether the trainer takes the recorded experts."""
        return self.config.trainer.router_replay

    def _logits(self, piece: VersionPiece, **options: Any) -> Tensor:
        replays = options.pop("replays", self.replays)
        return logits(self.model, piece, replays=replays, **options)

    def under(self, version_of: Callable[[VersionPiece], int], **options: Any) -> list[Tensor]:
        """Logits of every piece, with the weights of the version that `version_of` gives it."""
        out: dict[int, Tensor] = {}
        for version in sorted(set(map(version_of, self.pieces))):
            set_weights(self.model, self.tensors(version))
            for i, piece in enumerate(self.pieces):
                if version_of(piece) == version:
                    out[i] = self._logits(piece, **options)
        return [out[i] for i in range(len(self.pieces))]

    def differences(self, scored: Sequence[Tensor], **options: float) -> list[np.ndarray]:
        """By piece: log-probabilities of its tokens under these logits, less the recorded ones."""
        options = {"temperature": self.config.rollout.temperature} | options
        return [chosen(x, p, **options) - p.recorded_N for x, p in zip(scored, self.pieces, strict=True)]

    def diagnosis(self) -> Diagnosis:
        temperature = self.config.rollout.temperature
        tagged = self.under(lambda p: p.version)
        kernel = self.differences(tagged)
        trained = self.under(lambda p: self.trained_from.get(p.group, p.version))
        total = self.differences(trained)
        base, seen = _k2(kernel), _k2(total)
        draws = [self._wrong(x, p, temperature) for x, p in zip(tagged, self.pieces, strict=True)]
        wrong_draws = float(np.concatenate(draws).mean())
        floor = max(FLOOR[self.config.trainer.dtype], FLOOR[self.engine_dtype])
        suppositions: list[Supposition] = []
        if base > floor:
            suppositions = sorted(self._suppose(tagged, kernel, draws), key=lambda s: s.k2)
            cause, sentence = _verdict(suppositions, base, kernel, floor)
            if cause == "kernel" and (made := self._made_by_flips()) > 0.5 * base:
                cause, sentence = (
                    "routing",
                    f"k2 is {base:.2g}; experts that flip in bfloat16 make about {made:.2g} of it",
                )
        elif wrong_draws > WRONG_DRAWS:
            cause, sentence = "tokens", self._other_draws(tagged, wrong_draws)
        elif seen > (limit := self.config.guards.mismatch_k2.warn or 5e-4):
            cause = "staleness"
            sentence = f"under their own versions the tokens agree (k2 {base:.2g}); training came later (k2 {seen:.2g})"
        else:
            cause, sentence = "healthy", f"k2 is {base:.2g} under the tagged versions and {seen:.2g} in training"
            sentence += f", thresholds {floor:.0e} and {limit:.0e}"
        flips = route_flips(self.model, self.pieces[0])
        return Diagnosis(
            cause=cause,
            sentence=sentence,
            action=ACTIONS[cause],
            tokens=sum(len(p.at_N) for p in self.pieces),
            k2_tagged=base,
            k2_trained=seen,
            wrong_draws=wrong_draws,
            shares=_shares(kernel, total),
            flips=flips.share if flips else None,
            suppositions=tuple(suppositions[:8]),
        )

    def _made_by_flips(self) -> float:
        """The approximate k2 of experts that flip by bfloat16 rounding alone; 0 if experts are replayed or nothing is
        computed in bfloat16."""
        if self.replays or "bfloat16" not in (self.config.trainer.dtype, self.engine_dtype):
            return 0.0
        flips = [route_flips(self.model, p) for p in self.pieces[:TENSOR_PIECES]]
        return _k2([f.difference_N for f in flips if f is not None])

    def _wrong(self, logits_NV: Tensor, piece: VersionPiece, temperature: float) -> np.ndarray:
        """Whether each token differs from the one that its seed draws from these logits, bool [N]."""
        n = len(piece.at_N)
        ids_N, *_ = sample(logits_NV, np.full(n, temperature), np.ones(n), piece.seed_N, piece.at_N)
        return ids_N != piece.ids_T[piece.at_N]

    def _other_draws(self, tagged: Sequence[Tensor], wrong: float) -> str:
        """A sentence for draws that do not fit though log-probabilities do, with the temperature that explains them."""
        shares = {
            t: float(np.concatenate([self._wrong(x, p, t) for x, p in zip(tagged, self.pieces, strict=True)]).mean())
            for t in np.round(np.arange(0.5, 1.55, 0.05), 2).tolist()
        }
        best = min(shares, key=shares.__getitem__)
        if shares[best] < EXPLAINED * wrong:
            return f"the tokens were drawn at temperature {best:g} and recorded at {self.config.rollout.temperature:g}"
        return f"{wrong:.0%} of the tokens are not what their seeds draw, though their log-probabilities fit"

    def _suppose(
        self, tagged: Sequence[Tensor], kernel: Sequence[np.ndarray], draws: Sequence[np.ndarray]
    ) -> Iterable[Supposition]:
        base = self.config.rollout.temperature
        yield _altered_tokens(kernel, draws)
        for name, values in (
            ("temperature", np.round(np.arange(0.5, 1.55, 0.05), 2).tolist()),
            ("top_p", [0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99]),
        ):
            for value in values:
                options = {"temperature": base} | {name: value}
                if options != {"temperature": base}:
                    d = _k2(self.differences(tagged, **options))
                    yield Supposition("tokens", f"the engine sampled with {name} {value:g}", d)
        for back in range(1, OLDER + 1):
            if any(p.version - back in self.published for p in self.pieces):
                d = _k2(self.differences(self.under(lambda p, b=back: max(p.version - b, self.published[0]))))
                yield Supposition("weights", f"the engine served weights {back} version(s) older than it named", d)
                yield Supposition(
                    "cache", f"keys and values {back} version(s) older lie under the prompts", _k2(self._stale(back))
                )
        if any(p.routes_TLK is not None for p in self.pieces):
            d = _k2(self.differences(self.under(lambda p: p.version, replays=not self.replays)))
            what = "those that the engine took" if self.replays else "replayed"
            yield Supposition("routing", f"the recorded experts are not {what}", d)
        d = _k2(self.differences(self.under(lambda p: p.version, head="bfloat16")))
        yield Supposition("kernel", "the engine's head is computed in bfloat16", d)
        yield from self._tensors()

    def _stale(self, back: int) -> list[np.ndarray]:
        """Differences with keys and values of an older version for all of a prompt but its last token."""
        out = []
        for piece in self.pieces:
            keys = Keys(piece.graph)
            set_weights(self.model, self.tensors(max(piece.version - back, self.published[0])))
            self._logits(piece, layout=keys)
            keys.under = piece.prompt_length - 1
            set_weights(self.model, self.tensors(piece.version))
            logits_NV = self._logits(piece, layout=keys if keys.under else None)
            out.append(chosen(logits_NV, piece, temperature=self.config.rollout.temperature) - piece.recorded_N)
        return out

    def _tensors(self) -> Iterable[Supposition]:
        """Suppositions of one stale tensor, as after a lost part of a delta."""
        some = [p for p in self.pieces if p.version - 1 in self.published][:TENSOR_PIECES]
        for name in named_tensors(self.model) if some else ():
            pairs = [(self.tensors(p.version)[name], self.tensors(p.version - 1)[name]) for p in some]
            if all(torch.equal(now, before) for now, before in pairs):
                continue
            d = []
            for piece, (_, before) in zip(some, pairs, strict=True):
                set_weights(self.model, self.tensors(piece.version) | {name: before})
                logprobs = chosen(self._logits(piece), piece, temperature=self.config.rollout.temperature)
                d.append(logprobs - piece.recorded_N)
            yield Supposition("weights", f"{name} was left at the version before", _k2(d))


def _altered_tokens(kernel: Sequence[np.ndarray], draws: Sequence[np.ndarray]) -> Supposition:
    """The supposition of tokens replaced after sampling: all fits before the first one that its seed does not draw."""
    left, altered = [], 0
    for d, wrong in zip(kernel, draws, strict=True):
        bad = np.flatnonzero(np.abs(d) > 0.1)
        first = int(bad[0]) if len(bad) else len(d)
        if len(bad) and wrong[first] and (first == 0 or wrong[:first].mean() < 0.1):
            altered += 1
            left.append(d[:first])
        else:
            left.append(d)
    return Supposition("tokens", f"the tokens of {altered} episode(s) were replaced after they were sampled", _k2(left))


def _shares(kernel: Sequence[np.ndarray], total: Sequence[np.ndarray]) -> dict[str, float]:
    """Cov(part, total) / Var(total) of the two parts; they sum to 1."""
    a, b = np.concatenate(kernel), np.concatenate(total)
    variance = float(np.var(b))
    if variance == 0:
        return {}
    engine = float(((a - a.mean()) * (b - b.mean())).mean()) / variance
    return {"engine": engine, "staleness": 1 - engine}


def _verdict(
    suppositions: Sequence[Supposition], base: float, kernel: Sequence[np.ndarray], floor: float
) -> tuple[str, str]:
    """The cause and a sentence, for a difference that is not rounding; `suppositions` are sorted by remaining k2."""
    best = suppositions[0]
    if best.k2 <= max(EXPLAINED * base, floor):
        return best.cause, f"{best.what}: that takes k2 from {base:.2g} to {best.k2:.2g}"
    everywhere = float((np.abs(np.concatenate(kernel)) > 1e-3).mean())
    if everywhere > 0.5 and base > 5e-4:
        return (
            "weights",
            f"{everywhere:.0%} of the tokens differ (k2 {base:.2g}), and no published version explains them",
        )
    return "kernel", f"k2 is {base:.2g} and nothing that was tried explains it: rounding or another kernel"
