"""The records of the live loop. No torch here.

    Session (consent, arm) -> ServedTurn -> Suggestion (one edit) <- Signal (its fate)
    Signals before a cut -> Label -> TurnExit (trained, held or dropped)        Release, ReleaseEvent, Tombstone

Identifiers are ULIDs (https://github.com/ulid/spec). Times are integers, nanoseconds of the *server's* clock since the
epoch; a client's own time is kept apart and never compared with them. Every record but labels is written once and never
changed: labels and exits are derived from the others, and can be computed again.
"""

from __future__ import annotations

import os
import time
from enum import StrEnum

import msgspec

from etude.records import Record

_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


def ulid(at: int | None = None) -> str:
    """A new identifier, 26 characters that sort by their time; `at` in nanoseconds, by default now."""
    milliseconds = (time.time_ns() if at is None else at) // 1_000_000
    return ulid_of((milliseconds << 80) | int.from_bytes(os.urandom(10)))


def ulid_of(number: int) -> str:
    """128 bits as an identifier, e.g. of a keyed hash."""
    return "".join(_CROCKFORD[(number >> shift) & 31] for shift in range(125, -1, -5))


class Retention(StrEnum):
    """The retention of the content of a session; the days are the tenant's (LivePolicy)."""

    NONE = "none"  # no consent: counters only
    RAW = "raw"
    TRAINED = "trained"  # a version was trained on it


class Arm(StrEnum):
    """The group of an account, which determines the release that answers."""

    CONTROL = "control"
    CANARY = "canary"
    HOLDBACK = "holdback"  # stays on an old release for weeks, to measure the lift of later releases


class TurnKind(StrEnum):
    """The purpose of a request; only main turns are trained on."""

    MAIN = "main"
    SIDE = "side"  # a title, a summary, a sub-agent's own request
    BOT = "bot"  # CI and other clients without a person


class Consent(Record, frozen=True, kw_only=True):
    """Whether content may be kept and trained on, decided before anything is written."""

    granted: bool = False
    scope: str = ""  # e.g. "train"; empty without consent
    policy: str = ""  # where the decision is from: "tenant", "header", "tombstone"
    at: int = 0


class Session(Record, frozen=True, kw_only=True):
    """The requests of one account that belong together. `account` is a keyed hash of the user's name, which owns the
    contents; `voucher` is that of the account that the key vouches for (`users`), which has the arm and bounds the
    weight. `propensity` is the probability that an account is put in `arm`."""

    id: str
    tenant: str
    account: str
    voucher: str
    organisation: str = ""
    client: str = ""
    consent: Consent
    arm: Arm
    release: int
    propensity: float
    opened: int


class VersionSpan(Record, frozen=True, kw_only=True):
    """Tokens `low` to `high` - 1 of an answer were sampled under a version."""

    low: int
    high: int
    version: int


class ServedTurn(Record, frozen=True, kw_only=True):
    """One answer of the model. `blob` holds a TurnContent, encrypted with the key of the account."""

    id: str
    session: str
    sequence: int  # within the session
    kind: TurnKind
    release: int
    manifest: str  # digest of the weights that answered
    spans: tuple[VersionSpan, ...]
    prompt_tokens: int
    sampled_tokens: int
    blob: str | None  # None: the sampled tokens are unknown or not kept, see `reason`
    reason: str = ""  # why it cannot be trained on, e.g. "no_tokens" where the upstream does not return them
    scrubbed: dict[str, int]  # replacements by rule
    rules: str  # version of the scrubbing rules
    stop: str
    seconds: float
    cluster: str
    at: int


class TurnContent(Record, frozen=True, kw_only=True):
    """The content of one turn, after scrubbing: tokens are little-endian int32, log-probabilities float32, as in
    `records.Segment`. A turn is not trained on if any token of it was replaced."""

    dialect: str  # "chat", "responses" or "messages"
    request: bytes  # JSON
    response: bytes  # JSON: the message of the assistant in OpenAI's chat format, whatever the dialect
    prompt_ids: bytes
    ids: bytes
    logprobs: bytes
    temperature: float
    top_p: float


class Suggestion(Record, frozen=True, kw_only=True):
    """One edit proposed by a turn: a hunk of a file."""

    id: str
    turn: str
    path: str  # keyed hash of the path
    base: str  # keyed hash of the client's digest of the file before the edit
    old_lines: tuple[int, int]  # first line (0-based) and count
    new: str  # the same of the new lines
    characters: int  # of the new lines; shares of survival refer to them
    shown: int  # arrival at the log; a signal APPLIED tells that the edit was applied


class SignalKind(StrEnum):
    """The kinds of signals of clients, git and CI. Values are shares or probabilities in [0, 1] unless noted otherwise.
    The subject of FOLLOWUP, RETRY and ANSWERED is the turn of the new request; they count for the turn before it,
    except a FOLLOWUP whose source is "explicit". ENDED and TESTS of a session count for all of its turns, decayed."""

    SHOWN = "shown"
    APPLIED = "applied"
    REJECTED = "rejected"
    UNDONE = "undone"
    SURVIVED = "survived"  # share of the characters alive at `horizon`
    COMMITTED = "committed"  # share of the characters in the commit
    MERGED = "merged"
    REVERTED = "reverted"
    OVERWRITTEN = "overwritten"  # share of the characters that a later turn of the same session replaced
    FOLLOWUP = "followup"  # probability that a message is dissatisfied with the answer before; may have its text
    CORRECTION = "correction"  # the text that the user wanted
    RETRY = "retry"
    STOPPED = "stopped"
    RESTORED = "restored"  # a checkpoint from before the turn
    INVALID_CALL = "invalid_call"
    QUESTION = "question"  # the turn asked instead of editing
    ANSWERED = "answered"  # the user answered the question
    NO_EDIT = "no_edit"  # no edit in answer to a request for an edit
    TESTS = "tests"  # change of the share that passes, in [-1, 1]
    LINT = "lint"  # change of the number of findings
    RATING = "rating"  # thumbs, in [-1, 1]
    LATENCY = "latency"  # seconds that the user waited for the answer
    ERROR = "error"  # the request failed
    GONE = "gone"  # the file or the client is no longer observed: open edits are censored
    ENDED = "ended"  # end of the session; its success, in [-1, 1]


class Signal(Record, frozen=True, kw_only=True):
    """One observation. `event` is the client's identifier, a keyed hash, unique within the tenant; a repeated event
    is ignored, and refused on another subject or of another kind."""

    event: str
    tenant: str
    subject: str  # a suggestion, a turn or a session
    kind: SignalKind
    value: float
    horizon: float | None = None  # seconds after `shown`, of SURVIVED
    text: str | None = None  # key of the blob with the text of a follow-up or correction, encrypted
    observed_at: int  # by the client's clock
    arrived_at: int
    source: str  # "client", "git", "ci", "judge" or "explicit"
    client_sequence: int | None = None  # rising number of this source in the session, which orders its signals
    confidence: float = 1.0
    reader: str = ""  # of a FOLLOWUP that the gateway derived: "words", or "judge" and its model


class LabelState(StrEnum):
    """The state of a turn's outcome. An OPEN turn is held for a later window; a CENSORED turn has no outcome, and
    matured turns weigh more in its place."""

    OPEN = "open"
    MATURED = "matured"
    CENSORED = "censored"
    DROPPED = "dropped"


class Label(Record, frozen=True, kw_only=True):
    """The reward of a turn, a pure function of the log's rows before `cut`."""

    turn: str
    cut: int
    rules: str  # version of the rules that computed it
    state: LabelState
    reason: str = ""  # of DROPPED: "error"; of OPEN: "delay" (too young), "open" (waits for another turn's edit)
    reward: float = 0.0  # in [-1, 1]
    components: dict[str, float] = msgspec.field(default_factory=dict[str, float])
    weight: float = 1.0  # 1 / G(h), G = Kaplan-Meier survival of the censoring time, at most 10
    correction: str | None = None  # blob of the text that answers the turn, for the textual channel
    reader: str = ""  # of the follow-up that counts, as in `Signal`


class ExitKind(StrEnum):
    """The exit of a turn from a window. TRAINED and DROPPED are final; a HELD turn is part of the next window again."""

    TRAINED = "trained"
    HELD = "held"
    DROPPED = "dropped"


class TurnExit(Record, frozen=True, kw_only=True):
    """The one exit of a turn in a window."""

    turn: str
    window: int
    kind: ExitKind
    reason: str = ""
    weight: float = 0.0
    advantage: float = 0.0


class LiveSample(Record, frozen=True, kw_only=True):
    """A trained turn for the trainer: one sample of one prompt, without a group. Bytes as in TurnContent."""

    turn: str
    account: str
    cluster: str  # `spans` have the version numbers of its weight store
    manifest: str  # digest of the weights that answered
    prompt_ids: bytes
    ids: bytes
    logprobs: bytes
    temperature: float
    top_p: float
    spans: tuple[VersionSpan, ...]  # of `ids`
    reward: float  # in [-1, 1]
    advantage: float  # the reward above the cell's mean, not weighted
    weight: float  # of the sample's loss; the mean over a batch is 1
    correction: str | None  # text that answers the turn, for the textual channel


class ReleaseStage(StrEnum):
    """The stage of a release. The canary's shares are `LiveConfig.canary.stages`."""

    GATE = "gate"
    REFUSED = "refused"  # by the gate
    STAGED = "staged"  # has passed the gate; the canary's servers load it
    CANARY = "canary"
    RELEASED = "released"
    ROLLED_BACK = "rolled_back"


class Release(Record, frozen=True, kw_only=True):
    """A version that may reach users. A rollback is another release, with a higher number and an old digest."""

    number: int
    store: str  # URL of the weight store that it came from
    version: int  # of that store
    manifest: str  # its content digest
    parent: int | None  # the replaced release
    anchor: int | None  # the long-lived release that the gate compares with, too
    report: str | None  # digest of the gate's signed report
    window: int | None  # the window of its training
    at: int


class ReleaseEvent(Record, frozen=True, kw_only=True):
    """A step of a release; the last event has its present stage. `p` and `better`: of the lift at the end of a stage of
    the canary, if it was compared."""

    release: int
    sequence: int
    stage: ReleaseStage
    share: float  # of the accounts
    reason: str
    decided_by: str  # "canary", "gate", or the name of a person
    at: int
    p: float | None = None
    better: bool = False


class ClusterEvent(Record, frozen=True, kw_only=True):
    """The end (`drained`) or return of an arm's requests to a cluster; the last event counts."""

    cluster: str
    arm: Arm
    sequence: int
    drained: bool
    reason: str
    at: int


class Tombstone(Record, frozen=True, kw_only=True):
    """A forgotten account: its key is destroyed, and no later window trains on its turns."""

    tenant: str
    account: str
    at: int
    versions: tuple[int, ...]  # trained on the account


class Withdrawal(Record, frozen=True, kw_only=True):
    """Consent that an account took back: what it gave before `at` is deleted, and no later window trains on it.
    `policy`: "tenant" for what the tenant's policy had granted alone, "" for all."""

    tenant: str
    account: str
    policy: str = ""
    at: int


class LivePolicy(Record, frozen=True, kw_only=True):
    """The rules of a tenant."""

    consent: bool = False  # of requests without a header; a header may always refuse, and grant only if `may_grant`
    may_grant: bool = True
    raw_days: float = 30.0
    trained_days: float = 90.0
    requests_per_minute: int = 600  # of a key
    keep: tuple[str, ...] = ("home",)  # personal data (rules of `scrub.PERSONAL`) that stays where a request names it
    approval: bool = False  # a person must approve each stage beyond the gate
