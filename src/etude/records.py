"""The records that cross a boundary between two parts of etude, one per arrow of the loop. No torch here.

    Task -> Generation -> Episode (Segments of tokens) -> Group -> PolicyVersion (the manifest of new weights) -> ...

Records are frozen msgspec structs: they encode to MessagePack (wire, blobs) and JSON (manifests) without pickle.
Token arrays are little-endian bytes, so a 100k-token episode decodes without building Python lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from itertools import pairwise
from typing import Any, Literal, TypeVar

import blake3
import msgspec
import numpy as np

R = TypeVar("R", bound="Record")


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all records: immutable, keyword-only."""


class Outcome(StrEnum):
    """How an episode ended, as far as the loss is concerned. `SCORED` and `TAMPERED` carry a reward; `TIMEOUT` is our
    own deadline and scores 0 (the agent pays); `INFRA` is proved to be our fault: retried, and it leaves both the loss
    and the group's baseline. `QUARANTINED` is an error of etude's own code, which a repetition would only repeat: not
    retried, and it leaves them, too."""

    SCORED = "scored"
    INFRA = "infra"
    TIMEOUT = "timeout"
    TAMPERED = "tampered"
    QUARANTINED = "quarantined"

    @property
    def lost(self) -> bool:
        """Whether the episode has no tokens and no reward."""
        return self.value in LOST


LOST = (Outcome.INFRA.value, Outcome.QUARANTINED.value)


MAX_REWARD = 1e18  # of users' rewards and components, and its negative: gradients and their squares have 32 bits


class StopReason(StrEnum):
    """Why the agent loop ended."""

    FINISHED = "finished"  # the agent called `finish`, or answered without a tool call
    TURNS = "turns"  # the budget of turns is spent
    TOKENS = "tokens"  # the budget of sampled or context tokens is spent
    SECONDS = "seconds"  # the budget of wall time is spent
    REFUSED = "refused"  # the model's API refused the conversation
    ERROR = "error"  # ours: the engine or the box was lost


class Budget(Record, frozen=True, kw_only=True):
    """The limits of one episode. An episode that reaches a limit is graded as its tree stands."""

    turns: int = 8
    tokens: int = 512  # sampled tokens over all turns
    context: int = 2048  # prompt + sampled tokens of a segment
    seconds: float = 120.0


class Focus(Record, frozen=True, kw_only=True):
    """The lines that the user has open in the editor: part of the prompt. Lines are 1-based and inclusive."""

    path: str
    first_line: int
    last_line: int


NO_FOCUS = Focus(path="", first_line=1, last_line=1)


class Task(Record, frozen=True, kw_only=True):
    """One task of an environment: all that an agent learns of it. An environment subclasses this record for the fields
    that its grading needs, such as the right answer: the model never reads those."""

    id: str  # unique; letters, digits, ".", "_" and "-"
    prompt: str  # the user's message
    split: str = ""  # "train" | "heldout"; "" where the run divides the tasks
    repository: str = ""  # name and version of the source, e.g. "pydash-8.1.0"
    budget: Budget | None = None  # None: the run's
    focus: Focus = NO_FOCUS  # the file that is open in the editor; without a path none is
    visible_tests: tuple[str, ...] = ()  # node ids the `test` tool runs; doctests as "path::doctest:qualname"

    @property
    def cluster(self) -> str:
        """The name that tasks of one origin share: intervals of a pass rate treat them as one sample."""
        return self.id

    @property
    def hidden_tests(self) -> tuple[str, ...]:
        """The node ids of the tests that decide; () where something else decides."""
        return ()

    @property
    def decided(self) -> float:
        """The share of its tests that are decided outside of the tested process, inside of which they can be forged."""
        return 1.0

    @property
    def text(self) -> str:
        """A text that is typical for the task: probes of engines are made of such texts."""
        return self.prompt

    @property
    def damage(self) -> str:
        """How the task was made, for people: a mutation operator, or a kind of task."""
        return ""


class CodeTask(Task, frozen=True, kw_only=True):
    """One gated coding task: a broken tree, and hidden tests that decide. `changes` maps a path in the repository to
    the text that breaks it (layer L2 over the repository's layer L1); `solution` maps the same paths to the text that
    passes (the gold answer; never enters the agent's box)."""

    kind: str  # "mutation" | "removal" | "combined" | "class" | "feature" | "commit"; "harbor" for foreign tasks
    function: str  # "src/pydash/arrays.py::chunk"; train and held-out tasks never share one
    operator: str = ""  # e.g. "op_change"
    source_roots: tuple[str, ...]  # the agent's change set may touch only paths below these
    changes: dict[str, str] = {}
    solution: dict[str, str] = {}
    fail_to_pass: tuple[str, ...] = ()  # hidden node ids
    pass_to_pass: tuple[str, ...] = ()  # hidden node ids
    difficulty: dict[str, float]  # e.g. {"lines": 9, "sites": 1, "f2p": 2}
    licence: str

    @property
    def cluster(self) -> str:
        """The broken function."""
        return self.function

    @property
    def hidden_tests(self) -> tuple[str, ...]:
        """Both kinds of hidden tests."""
        return (*self.fail_to_pass, *self.pass_to_pass)

    @property
    def decided(self) -> float:
        """The share that `difficulty` names; 1 if it is unknown."""
        return self.difficulty.get("decided", 1.0)

    @property
    def text(self) -> str:
        """The prompt, and its file from the broken function on."""
        lines = self.changes.get(self.focus.path, "").split("\n")
        return "\n".join([self.prompt, *lines[self.focus.first_line - 1 :]]).removesuffix("\n")

    @property
    def damage(self) -> str:
        """The mutation operator, or the kind."""
        return self.operator or self.kind


class Routes(Record, frozen=True, kw_only=True):
    """The experts that consecutive positions of a row went through, in the order in which the engine ran them."""

    first: int  # position of the first
    ids: bytes  # uint8 [positions, layers, slots]; little-endian uint16 where `wide`
    layers: int  # those that have experts
    slots: int  # experts of a token in one layer
    wide: bool = False  # more than 256 experts

    def array(self) -> np.ndarray:
        """int16 [positions, layers, slots]."""
        flat = np.frombuffer(self.ids, "<u2" if self.wide else "u1")
        return flat.reshape(-1, self.layers, self.slots).astype(np.int16)

    @property
    def end(self) -> int:
        """The position after the last."""
        return self.first + len(self.ids) // (self.layers * self.slots * (2 if self.wide else 1))


class Generation(Record, frozen=True, kw_only=True):
    """The tokens that the engine sampled for one request, or a part of them: lists of equal length, one entry per
    sampled token."""

    ids: list[int]
    logprobs: list[float]  # log-probability under the distribution sampled from (after temperature and top-p)
    versions: list[int]  # weight version that sampled each token
    finish_reason: str  # "stop" | "length" | "abort"; "" of a part after which others follow
    routes: Routes | None = None  # of the fed positions, from the asked one on: all but the last sampled token
    cached_tokens: int = 0  # of the prompt, not computed for this request
    cached_document_tokens: int = 0  # those of them that belong to documents
    kv_version: int = -1  # oldest version that computed a key or value these tokens saw; -1: unknown
    recipe: str = ""  # how the documents of the prompt were computed and placed; empty: it had none
    accepted_draft_tokens: int = 0  # of the request's own draft sources: drafted and emitted
    rejected_draft_tokens: int = 0  # drafted and never emitted; every place of a source counts once


def joined(parts: Sequence[Generation]) -> Generation:
    """The generation whose parts, at least one, these are. Its key version is the oldest of theirs. Raises ValueError
    for routes of positions that do not follow each other, and for documents that were computed in several ways."""
    last, routes = parts[-1], [part.routes for part in parts if part.routes is not None]
    if any((a.end, a.layers, a.slots, a.wide) != (b.first, b.layers, b.slots, b.wide) for a, b in pairwise(routes)):
        raise ValueError("the experts of a generation's parts are not those of consecutive positions")
    recipes = {part.recipe for part in parts if part.recipe}
    if len(recipes) > 1:
        raise ValueError(f"the documents of one generation were computed as {' and as '.join(sorted(recipes))}")
    data = b"".join(one.ids for one in routes)
    return Generation(
        ids=[token for part in parts for token in part.ids],
        logprobs=[logprob for part in parts for logprob in part.logprobs],
        versions=[version for part in parts for version in part.versions],
        finish_reason=last.finish_reason,
        routes=msgspec.structs.replace(routes[0], ids=data) if routes else None,
        cached_tokens=last.cached_tokens,
        cached_document_tokens=last.cached_document_tokens,
        kv_version=min((part.kv_version for part in parts if part.ids), default=last.kv_version),
        recipe="".join(recipes),
        accepted_draft_tokens=sum(part.accepted_draft_tokens for part in parts),
        rejected_draft_tokens=sum(part.rejected_draft_tokens for part in parts),
    )


class Document(Record, frozen=True, kw_only=True):
    """A document of a segment: its tokens see each other only, what follows all documents sees them."""

    length: int  # tokens
    digest: str  # of them, see `token_digest`


def token_digest(ids: Sequence[int] | np.ndarray) -> str:
    """BLAKE3 of token ids as little-endian int64, hexadecimal: what documents are known by."""
    return blake3.blake3(np.asarray(ids, "<i8").tobytes()).hexdigest()


def segment_digest(ids: blake3.blake3, mask: blake3.blake3) -> str:
    """The digest of a segment's tokens, of the two hashes that were fed its ids (int32) and its mask (uint8) in order.
    Order is position, so it changes if an id, its place or whether it was sampled does."""
    return blake3.blake3(ids.digest() + mask.digest()).hexdigest(length=16)


class Segment(Record, frozen=True, kw_only=True):
    """An append-only run of tokens of one episode. All arrays have the same length T. `mask` is 1 on tokens the policy
    sampled; elsewhere `logprobs` is 0.0 and `versions` is -1. `turn_starts` holds the offset of each sampled turn, so a
    viewer can cut the segment into turns. `digest` is that of the tokens as they were appended one after another: the
    trainer refuses a segment that holds others. The tokens of `documents` come first, in their order, and count as part
    of the prompt."""

    ids: bytes  # int32[T]
    mask: bytes  # uint8[T]
    logprobs: bytes  # float32[T]
    versions: bytes  # int32[T]
    prompt_length: int  # tokens before the first sampled one; shared by the members of a group
    turn_starts: tuple[int, ...] = ()
    routes: Routes | None = None  # from position 0 on; those after its end have none
    documents: tuple[Document, ...] = ()
    recipe: str = ""  # how the engine computed and placed them
    digest: str = ""  # see `segment_digest`

    def spans(self) -> list[tuple[int, int]]:
        """First and last offset (exclusive) of the sampled tokens of each turn."""
        mask_T = np.frombuffer(self.mask, "u1")
        bounds = pairwise((*self.turn_starts, len(mask_T)))
        return [(a, a + int(mask_T[a:b].sum())) for a, b in bounds]

    @property
    def sampled_tokens(self) -> int:
        """How many tokens the policy sampled."""
        return int(np.frombuffer(self.mask, "u1").sum())

    @property
    def intact(self) -> bool:
        """Whether ids and sampled positions are those that were appended."""
        return self.digest == segment_digest(blake3.blake3(self.ids), blake3.blake3(self.mask))

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """`ids_T, mask_T, logprobs_T, versions_T` as read-only numpy views."""
        return (
            np.frombuffer(self.ids, "<i4"),
            np.frombuffer(self.mask, "u1"),
            np.frombuffer(self.logprobs, "<f4"),
            np.frombuffer(self.versions, "<i4"),
        )


class ToolCall(Record, frozen=True, kw_only=True):
    """A call parsed from a turn. `arguments` is None when the call is malformed: `error` is the reason then."""

    name: str
    arguments: dict[str, object] | None
    error: str = ""


class Turn(Record, frozen=True, kw_only=True):
    """One turn as text for the report, never fed back to the model."""

    text: str
    calls: tuple[ToolCall, ...]
    results: tuple[str, ...]
    seconds_model: float
    seconds_tools: float
    continued: bool = False  # it ended at the budget of thoughts, and the next one is its rest


class GivenAdvantage(Record, frozen=True, kw_only=True):
    """The advantage of an episode that no group is compared with, such as a turn of a user."""

    advantage: float
    weight: float = 1.0  # that its loss is multiplied by


class Hint(Record, frozen=True, kw_only=True):
    """The part of an episode's prompt that only a teacher reads: further tokens (int32) that begin at offset `at`."""

    ids: bytes
    at: int


class Episode(Record, frozen=True, kw_only=True):
    """One whole attempt at a task. Stored once as a blob; the ledger keeps its key and figures."""

    id: str
    group_id: int
    member: int
    attempt: int
    task_id: str
    repository: str = ""  # of the task, in a run of several
    seed: int
    outcome: Outcome
    stop_reason: StopReason
    reward: float  # the grade less the costs of behaviour; 0.0 when the outcome is INFRA or QUARANTINED
    grade: float | None = None  # the part of the reward that the work has earned; None in older records
    passed: bool
    segments: tuple[Segment, ...]
    turns: tuple[Turn, ...]
    metrics: dict[str, float]  # for display, e.g. {"turns": 3, "tests_run": 2, "malformed": 0, "edits": 2}
    flags: tuple[str, ...] = ()  # what the detectors of cheating found, sorted; see grading/cheats.py
    tools: tuple[dict[str, Any], ...] = ()  # definitions that an outside agent gave its model, in OpenAI's format
    detail: str = ""  # one sentence: why it failed, or what was tampered with
    given: GivenAdvantage | None = None  # None: the advantage is that within its group
    hint: Hint | None = None  # for [distill]

    @property
    def sampled_tokens(self) -> int:
        """How many tokens the policy sampled in all segments."""
        return sum(segment.sampled_tokens for segment in self.segments)

    @property
    def min_version(self) -> int:
        """The oldest weight version that sampled a token of this episode; -1 if nothing was sampled."""
        arrays = [segment.arrays() for segment in self.segments]
        return min((int(versions[mask == 1].min()) for _, mask, _, versions in arrays if mask.any()), default=-1)


class EpisodeBlob(Record, frozen=True, kw_only=True):
    """Where the bytes of an episode lie in the store of rollouts, and their BLAKE3 digest."""

    key: str
    digest: str


class Group(Record, frozen=True, kw_only=True):
    """G episodes of one task. `episodes` are in member order, those that were lost left out."""

    id: int
    index: int  # position in the run's task order
    task_id: str
    admitted_version: int
    episodes: tuple[EpisodeBlob, ...]


class Population(Record, frozen=True, kw_only=True):
    """Episodes that ended and were not lost: how long they are, and how they ended."""

    episodes: int
    length: float  # mean of sampled tokens
    length_p50: int
    length_p90: int
    length_max: int
    pass_rate: float
    outcomes: dict[str, int]


class PayloadPart(Record, frozen=True, kw_only=True):
    """One object of a payload, written by one rank of the trainer. Ranges of ranks overlap, and no chunk is in two
    objects of a payload."""

    key: str  # in the store
    bytes: int
    digest: str  # blake3
    first: int  # chunks [first, stop) of the schema are the only ones it may hold
    stop: int


class Skip(Record, frozen=True, kw_only=True):
    """A folded delta: from an older version to the one whose manifest names it, past all those between."""

    base: int
    parts: tuple[PayloadPart, ...]


class Anchor(Record, frozen=True, kw_only=True):
    """Every element of a version. Without parts, they are the weights of the model folder that the run began with."""

    version: int
    parts: tuple[PayloadPart, ...]


StepAction = Literal["go", "skip", "rollback", "halt"]
"""What the guards make of a training step; see trainer/rl/guards.py."""


class StepRecord(Record, frozen=True, kw_only=True):
    """The guards' figures of the step that made a version. None: not measured."""

    action: StepAction
    good: int  # the newest version that the guards have nothing against: where a rollback goes
    grad_norm: float | None = None  # of the last update, before clipping
    mismatch_k2: float | None = None  # of tokens that the trained version sampled; None also if they are too few
    probe_k2: float | None = None  # the largest of the engines' that arrived during the step
    lr: float | None = None  # of its updates; with `updates`, what a resumed run needs to compute the step again
    updates: int = 0  # of the optimizer; none where the step was skipped, or held nothing to train on


MANIFEST_FORMAT = 4


class AdaptedBase(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base that the adapters of a version (LoRA) are added to. The tensors of such a version are adapters; engines
    hold the base already, and compute with the sum (`models/lora.py`)."""

    scale: float  # of a product of two adapters
    schema: str  # id of the base's names, types and shapes
    base: str  # digest of the base
    live: str  # digest of the base with the adapters merged


class PolicyVersion(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The manifest of one published version. Immutable; created if absent; complete once it exists. `groups` names what
    the version was trained on: the ledger follows from the manifests, not the other way round."""

    format: int = MANIFEST_FORMAT
    run: str  # the same for all versions of a run; random
    writer: str  # the process that wrote it; random
    version: int
    parent: int | None  # version that the delta applies to; None: no delta, `anchor` is this very version
    delta: tuple[PayloadPart, ...]  # empty if nothing changed
    skips: tuple[Skip, ...] = ()
    anchor: Anchor  # the newest one that was complete when this was published
    schema: str  # id of the tensors' names, types and shapes, see weights/ulpd/chunk_grid.py
    model: str = ""  # id of the configuration and vocabulary, see models/loading.py; empty: unknown
    digest: str  # of the version's tensors, see weights/ulpd/digest.py
    adapted: AdaptedBase | msgspec.UnsetType = msgspec.UNSET  # absent where the tensors are all weights of the model
    changed: int  # elements that differ from the parent
    elements: int
    groups: tuple[int, ...]
    created: float  # seconds since the epoch
    metrics: dict[str, float]  # for display
    step: StepRecord | msgspec.UnsetType = msgspec.UNSET  # absent where no step of reinforcement learning led here
    signature: str = ""  # Ed25519 over the rest, hexadecimal, see weights/signature.py; empty: unsigned

    @property
    def live(self) -> str:
        """The digest of the tensors that an engine of this version computes with."""
        return self.digest if isinstance(self.adapted, msgspec.UnsetType) else self.adapted.live

    @property
    def kind(self) -> str:
        """The kind of payload that an engine downloads: "delta", or where a chain begins "anchor", or "folder" if
        nothing is downloaded."""
        return "delta" if self.parent is not None else "anchor" if self.anchor.parts else "folder"

    @property
    def payload(self) -> tuple[PayloadPart, ...]:
        """The objects of that download."""
        return self.anchor.parts if self.parent is None else self.delta

    @property
    def payload_bytes(self) -> int:
        """Size of that download."""
        return sum(part.bytes for part in self.payload)


def encode(record: Record) -> bytes:
    """MessagePack bytes of any record."""
    return msgspec.msgpack.encode(record)


def decode(data: bytes, kind: type[R]) -> R:
    """The record of type `kind` in `data`. Raises ValueError if it is not one."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError as e:
        raise ValueError(f"not a {kind.__name__} record: {e}") from None
