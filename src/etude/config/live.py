"""Stage "live": the gateway before the served model, learning from its users, and the release of versions."""

from __future__ import annotations

import re
from typing import Literal

import pydantic
from pydantic import Field

from etude.config.sections import LocalPath, LocalPathOrNone, Section, option


def _check_urls(urls: tuple[str, ...]) -> None:
    """Raises ValueError for an address that is no server's."""
    if wrong := [url for url in urls if not re.fullmatch(r"https?://[^/@\s]+/?", url)]:
        raise ValueError(f"{wrong[0]!r} is not a URL like http://host:8000, without user and path")


class ClusterConfig(Section):
    """Inference servers that serve from one weight store."""

    name: str = Field(description="name of the cluster in logs", pattern=r"^[a-z0-9][a-z0-9-]*$")
    urls: tuple[str, ...] = Field(description="servers that speak OpenAI's and Anthropic's API", min_length=1)
    store: LocalPath = Field(description="URL of the cluster's weight store: the control's version")
    canary_urls: tuple[str, ...] = option((), "servers of the canary; none: every release reaches all at once")
    canary_store: LocalPathOrNone = option("none", "URL of the canary's weight store")
    holdback_urls: tuple[str, ...] = option((), "servers of the holdback; none: no account stays on an old release")
    holdback_store: LocalPathOrNone = option("none", "URL of the holdback's weight store")

    @pydantic.model_validator(mode="after")
    def _an_arm_has_servers_and_a_store(self) -> ClusterConfig:
        arms = {"canary": (self.canary_urls, self.canary_store), "holdback": (self.holdback_urls, self.holdback_store)}
        for name, (servers, store) in arms.items():
            if bool(servers) != (store != "none"):
                raise ValueError(f"{name}_urls and {name}_store belong together: give both or neither")
        stores = [store for store in (self.store, self.canary_store, self.holdback_store) if store != "none"]
        if len(set(stores)) != len(stores):
            raise ValueError("each arm has a weight store of its own")
        _check_urls((*self.urls, *self.canary_urls, *self.holdback_urls))
        return self


class LiveGatewayConfig(Section):
    """The server that users' clients talk to."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8100, "port to listen on; 0 picks a free one", ge=0, le=65535)
    queue: int = option(4096, "records that wait for the disk; beyond it a turn is answered and not recorded", ge=1)
    seconds: float = option(600.0, "deadline of an answer", gt=0)


class JudgeConfig(Section):
    """The model that reads what users say next. Its server gets their messages, scrubbed."""

    url: str = Field(description="base of the API, ending in /v1", pattern=r"^https?://[^@\s]+$")
    model: str = Field(description="name of the model there", min_length=1)
    api: Literal["openai", "anthropic"] = option("openai", "format of the API")
    key_variable: str = option("", "environment variable with its key; empty: it needs none")
    seconds: float = option(30.0, "deadline of a verdict; a later one is no signal", gt=0)


class LabelsConfig(Section):
    """Rules that turn signals into rewards (docs/live.md)."""

    window_seconds: float = option(1800.0, "attribution window after an edit was shown", gt=0)
    most_weight: float = option(10.0, "maximum of the weight by which an edit represents censored ones", ge=1)
    per_account: int = option(5, "samples of an account in a window", ge=1)
    account_share: float = option(0.01, "share of the weight that one account has at most", gt=0, le=1)
    organisation_share: float = option(0.05, "share of the weight that one organisation has at most", gt=0, le=1)
    tenant_share: float = option(
        0.25, "share that one tenant has at most, unless most accounts are its own", gt=0, le=1
    )
    trim: float = option(0.1, "share of the weight of a cell left out at either end of its mean", ge=0, lt=0.5)
    age_days: float = option(7.0, "age from which an account weighs in full; a new one weighs a fifth", gt=0)
    coverage: int = option(20, "accounts that must have rated similar prompts before ratings count", ge=1)
    shrinkage: float = option(20.0, "turns by which a cell's mean is drawn to the global one", ge=0)
    delay_seconds: float = option(
        2400.0, "age of a turn before it may be trained on: the window, and time for signals that come late", gt=0
    )
    least_batch: int = option(64, "turns of a window; fewer are held for the next", ge=1)
    question_cost: float = option(0.25, "of a question that no surviving edit follows", ge=0, le=1)
    no_edit_cost: float = option(0.5, "cost of no edit where the user requested one", ge=0, le=1)
    threshold: float = option(0.25, "an edit is worth showing if it is accepted more often than this", gt=0, lt=1)
    characters: float = option(200.0, "characters kept that earn the full reward", ge=1)
    session_decay: float = option(0.8, "by which a session's outcome fades for each turn before its last", ge=0, le=1)

    @pydantic.model_validator(mode="after")
    def _turns_wait_for_their_window(self) -> LabelsConfig:
        if self.delay_seconds < self.window_seconds:
            raise ValueError("delay_seconds is at least window_seconds: a turn is trained on after its window")
        return self


class GateConfig(Section):
    """Checks that a version must pass before any user meets it."""

    base: str = option("nano", "model that the versions began with: folder, or name of a bundled one")
    suites: tuple[LocalPath, ...] = option((), "frozen dataset folders, of which held-out tasks are played")
    floor: float = option(0.05, "pass rate that a version must reach, also one with none to compare with", gt=0, le=1)
    margin: float = option(
        0.05, "share of the tasks by which a version may be worse; a gate reports its limit", gt=0, lt=1
    )
    alpha: float = option(0.05, "probability that a version worse by the margin passes", gt=0, lt=0.5)
    samples: int = option(1, "episodes of each task", ge=1)
    replay: int = option(2000, "recent consented prefixes whose last turn is generated again", ge=0)
    cost: float = option(1.25, "tokens, turns and seconds per task, as a multiple of the incumbent's, at most", gt=1)
    planted: tuple[str, ...] = option((), "strings that no version may know")
    urls: tuple[str, ...] = option((), "servers of the recipe's engine for the gate alone; none: it starts its own")
    store: LocalPathOrNone = option("none", "URL of the weight store that these servers follow")

    @pydantic.model_validator(mode="after")
    def _servers_have_a_store(self) -> GateConfig:
        if bool(self.urls) != (self.store != "none"):
            raise ValueError("urls and store belong together: give both or neither")
        _check_urls(self.urls)
        return self


class CanaryConfig(Section):
    """Steps by which a version reaches users."""

    stages: tuple[float, ...] = option((0.01, 0.05, 0.25, 1.0), "shares of the accounts, rising to 1")
    minutes: float = option(20.0, "minimum length of a stage", ge=0)
    slot_minutes: float = option(10.0, "length of the slots that accounts are counted in and paired by", gt=0)
    least: int = option(100, "minimum of accounts in the canary before a stage ends", ge=1)
    hours: float = option(24.0, "time after which a stage that shows too little ends: a rollback, or a person", gt=0)
    margin: float = option(
        0.05, "share of edits by which a version that is not shown better may keep fewer", gt=0, lt=1
    )
    alpha: float = option(0.01, "probability that an equal version is stopped, over all guardrails", gt=0, lt=0.5)
    lift_alpha: float = option(0.05, "share of false findings among versions that were found better", gt=0, lt=0.5)
    slower: float = option(1.25, "latency as a multiple of the control's from which it is harm", ge=1)
    holdback: float = option(0.02, "share of the accounts that stays on an old release", ge=0, lt=0.5)
    approval: bool = option(False, "a person must approve each stage: `etude live approve`")

    @pydantic.model_validator(mode="after")
    def _stages_rise_to_all(self) -> CanaryConfig:
        if not self.stages or list(self.stages) != sorted(set(self.stages)) or self.stages[0] <= 0:
            raise ValueError("stages are rising shares above 0")
        if self.stages[-1] != 1:
            raise ValueError("the last of stages is 1: all accounts")
        return self


class LoopConfig(Section):
    """The loop of `etude live run`."""

    hours: float = option(4.0, "between the cuts of two windows, at least", gt=0)
    minutes: float = option(60.0, "that training on a window may take", gt=0)
    approval: bool = option(False, "a person must approve each version after the gate: `etude live approve`")


class LiveConfig(Section):
    """The live loop. Its log, keys and blobs lie below `folder`."""

    stage: Literal["live"] = "live"
    name: str = option("live", "name of the loop", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    folder: LocalPath = Field(description="folder of the log, blobs and reports, mode 0700")
    database: str | None = option(None, "SQLAlchemy URL of the log; default: live.db in the folder")
    clusters: tuple[ClusterConfig, ...] = Field(min_length=1)
    model: str | None = option(None, "name of the model in clients' requests; none: the clusters' own")
    signing_key: LocalPath | None = option(
        None,
        "Ed25519 key of reports and of clusters' manifests; the trainer's manifests must be signed by it, too",
    )
    train: LocalPath | None = option(None, "recipe of stage rl whose trainer learns from a window")
    gateway: LiveGatewayConfig = LiveGatewayConfig()
    judge: JudgeConfig | None = option(None, "reads follow-ups, in any language; none: an English word list does")
    labels: LabelsConfig = LabelsConfig()
    gate: GateConfig = GateConfig()
    canary: CanaryConfig = CanaryConfig()
    loop: LoopConfig = LoopConfig()

    @pydantic.model_validator(mode="after")
    def _clusters_differ(self) -> LiveConfig:
        names = [cluster.name for cluster in self.clusters]
        if len(set(names)) != len(names):
            raise ValueError("clusters have different names")
        stores = {store for each in self.clusters for store in (each.store, each.canary_store, each.holdback_store)}
        if self.gate.urls and self.gate.store in stores:
            raise ValueError("gate.store is a store of its own: versions that nobody has released are served from it")
        served = {url.rstrip("/") for c in self.clusters for url in (*c.urls, *c.canary_urls, *c.holdback_urls)}
        if shared := sorted(served & {url.rstrip("/") for url in self.gate.urls}):
            raise ValueError(f"gate.urls are the gate's alone, and {shared[0]} is a cluster's")
        return self
