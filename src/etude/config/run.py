"""Stage "rl": the tables of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, cast

import pydantic
from pydantic import AfterValidator, Field

from etude.config.bundled import bundled
from etude.config.engine import InferenceConfig
from etude.config.sandbox import NamespaceSandboxConfig, SandboxConfig
from etude.config.sections import LocalPath, LocalPathOrNone, ModelPath, Section, absolute
from etude.config.tasks import TasksConfig
from etude.records import Budget


class ModelConfig(Section):
    """The model that is trained."""

    path: ModelPath = Field(
        default="nano", validate_default=True, description="HF folder, or name of a bundled model such as nano"
    )
    dialect: Literal["auto", "compact", "hermes"] = Field(
        default="auto", description="how tool calls are written in tokens"
    )

    @property
    def name(self) -> str:
        """The name of a bundled model, else the folder."""
        name = Path(self.path).name
        return name if bundled(f"models/{name}") == Path(self.path) else self.path


class AgentConfig(Section):
    """An outside agent, which runs in the box in place of the built-in loop (docs/harness.md)."""

    command: str = Field(min_length=1, description="shell command that starts the agent; $TASK is the instruction")
    folder: LocalPath | None = Field(default=None, description="the agent's program; boxes have it at /opt/agent")
    environment: dict[str, str] = Field(default={}, description="variables besides those of the endpoint")
    memory_mb: int = Field(default=4096, ge=64, description="memory of a box, also the address space of a process")
    processes: int = Field(default=128, ge=1, description="processes and threads of a box")


class RolloutConfig(Section):
    """How episodes are sampled."""

    prompts: int = Field(default=16, ge=1, description="P: groups per optimizer step")
    group: int = Field(default=16, ge=2, description="G: episodes per group")
    forks: int = Field(default=1, ge=1, description="members of a group that are forked from a shared prefix; 1: none")
    fork_turns: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(1,), min_length=1, description="turns of a shared prefix; of several, the seed chooses one"
    )
    staleness: int = Field(default=1, ge=0, description="O: versions a token may lag when trained on; 0 is on-policy")
    max_in_flight: int | Literal["auto"] = Field(
        default=128, description="live episodes; auto: as many as keep the engines' batches full (docs/async.md)"
    )
    temperature: float = Field(default=1.0, gt=0)
    turns: int = Field(default=6, ge=1)
    tokens: int = Field(default=320, ge=1, description="sampled tokens of an episode")
    context: int = Field(default=1024, ge=16, description="prompt and sampled tokens of an episode, or of a segment")
    summarise_at: int = Field(
        default=0,
        ge=0,
        description="tokens of a segment after which the agent summarises and a new one begins; 0: never",
    )
    summary_tokens: int = Field(default=512, ge=1, description="sampled tokens of a summary, at most")
    seconds: float = Field(default=60.0, gt=0, description="wall time of an episode")
    documents: bool = Field(
        default=False,
        description="show the open file, and results of reading and search, as documents (docs/documents.md)",
    )
    apply: str | None = Field(
        default=None, description="URL of a server that applies the agent's edit sketches; none: they are merged"
    )
    agent: AgentConfig | None = Field(default=None, description="an outside agent in place of the built-in loop")
    machine_profiles: LocalPathOrNone | None = Field(
        default=None,
        description='fingerprints (.jsonl) or a description (.toml) of machines that boxes imitate; "none": nothing',
    )
    lease_seconds: float = Field(
        default=120.0, gt=0, description="after which episodes of a controller that died are played again"
    )
    stall_seconds: float = Field(
        default=300.0, gt=0, description="without progress until its cause is printed; five times as long ends the run"
    )

    @pydantic.field_validator("max_in_flight", mode="before")
    @classmethod
    def _number_or_auto(cls, value: Any) -> Any:
        if value != "auto" and (type(value) is not int or value < 1):
            raise ValueError('give a number of live episodes from 1, or "auto"')
        return value

    @pydantic.model_validator(mode="after")
    def _summaries_fit(self) -> RolloutConfig:
        if self.summarise_at and self.summarise_at + 2 * self.summary_tokens >= self.context:
            raise ValueError(
                f"rollout.summarise_at = {self.summarise_at} and two summaries of {self.summary_tokens} tokens do not "
                f"fit into rollout.context = {self.context}; lower one of the first two"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _forks_fit(self) -> RolloutConfig:
        if self.group % self.forks:
            raise ValueError(f"rollout.forks = {self.forks} must divide rollout.group = {self.group}")
        if self.forks == 1:
            return self
        if self.max_in_flight != "auto" and self.max_in_flight < self.forks:
            raise ValueError(f"rollout.forks = {self.forks} needs a rollout.max_in_flight that is not smaller")
        if max(self.fork_turns) >= self.turns:
            raise ValueError(f"rollout.fork_turns must be below rollout.turns = {self.turns}")
        if self.agent is not None:
            raise ValueError("an outside agent cannot be forked: drop rollout.forks")
        return self

    def budget(self) -> Budget:
        """The budget of an episode whose task has none of its own."""
        return Budget(turns=self.turns, tokens=self.tokens, context=self.context, seconds=self.seconds)


class LengthCost(Section):
    """Composer's cost of effort: concave and increasing in x, a weighted sum of tokens, calls and turns."""

    weight: float = Field(default=0.0, ge=0, description="factor of the cost in the reward; 0: off")
    k: float = Field(default=0.01, gt=0, description="where the cost begins to bend: at x = 1 / k")
    q: float = Field(default=1.0, ge=0, description="how strongly it bends; 0: linear, 1: logarithm")
    thinking: float = Field(default=1.0, ge=0, description="weight of a sampled token inside <think>")
    calling: float = Field(default=1.0, ge=0, description="weight of another sampled token of a turn that calls tools")
    final: float = Field(default=1.0, ge=0, description="weight of another sampled token of a turn without a call")
    output: float = Field(default=0.0, ge=0, description="weight of a token that a tool put into the context")
    calls: float = Field(default=0.0, ge=0, description="weight of a tool call")
    turns: float = Field(default=0.0, ge=0, description="weight of a turn")


Behaviour = Literal[
    "edit_errors", "malformed", "repeats", "summary_errors", "tests_failed", "todo_open", "truncated", "undo",
    "unfinished", "untested",
]  # fmt: skip


class RewardConfig(Section):
    """Costs that are subtracted from the grade of an episode."""

    refused_edits: float = Field(
        default=0.0, ge=0, le=1, description="cost of edits that change nothing, times their share of all edits"
    )
    length: LengthCost = LengthCost()
    overlong: int = Field(
        default=0, ge=0, description="last tokens of the budget over which the cost rises to 1 (DAPO)"
    )
    custom: str | None = Field(
        default=None,
        description='import path of a function "module:name": takes an Episode, returns a number that is added',
    )
    behaviour: dict[Behaviour, Annotated[float, Field(ge=0)]] = Field(
        default={}, description="cost of each occurrence of a behaviour"
    )
    behaviour_cap: float = Field(default=0.5, ge=0, description="cost of all behaviours together, at most")


Mask = Literal["ipo", "dppo", "geo_rs", "opsm", "veto"]


class LossConfig(Section):
    """The loss: a preset, and what is replaced in it. See docs/losses.md."""

    preset: Literal[
        "composer2", "fireworks", "grpo", "dr_grpo", "dapo", "tis", "icepop", "cispo", "gspo", "ppo"
    ] = Field(default="composer2", description="row of the table of losses")  # fmt: skip
    custom: str | None = Field(
        default=None,
        description="MODULE:FUNCTION of a loss of your own, a function of trainer.rl.loss.LossTokens that returns the "
        "loss of every token; advantages, KL term, masks and divisor stay the preset's",
    )
    kl: Literal["none", "k1", "k2", "k3"] | None = Field(default=None, description="estimator of the KL to version 0")
    kl_beta: float | None = Field(default=None, ge=0, description="its weight; 0 saves the reference model's pass")
    clip_low: float | None = Field(default=None, ge=0, description="least ratio to the proximal policy")
    clip_high: float | None = Field(default=None, ge=1, description="greatest ratio to the proximal policy")
    anchor: Literal["proximal", "rollout"] | None = Field(
        default=None, description="policy that the ratio is taken against"
    )
    correction: Literal["none", "truncate", "band"] | None = Field(
        default=None, description="weight of proximal against rollout policy: none, cut at the cap, or 0 outside a band"
    )
    cap_low: float | None = Field(default=None, ge=0, description="least importance weight of the correction")
    cap_high: float | None = Field(default=None, ge=1, description="greatest importance weight of the correction")
    masks: tuple[Mask, ...] = Field(default=(), description="tokens and episodes to leave out; combine with any preset")
    updates: int = Field(default=1, ge=1, description="optimizer updates per batch, each on a share of its groups")
    gamma: float = Field(default=1.0, gt=0, le=1, description="ppo: discount per token")
    lam: float = Field(default=0.95, ge=0, le=1, description="ppo: lambda of generalised advantage estimation")
    value_weight: float = Field(default=0.5, ge=0, description="ppo: weight of the value error in the loss")
    value_lr: float = Field(default=1e-3, gt=0, description="ppo: learning rate of the value head")


GuardAction = Literal["warn", "skip", "rollback", "halt"]


class Guard(Section):
    """Two thresholds on a figure; beyond `stop` the run does `action`. An absent threshold is never crossed."""

    warn: float | None = Field(default=None, description="threshold beyond which the step is reported")
    stop: float | None = Field(default=None, description="threshold beyond which the action is done")
    action: GuardAction = Field(
        default="skip", description="report, drop the gradients, go back to the last good version, or end the run"
    )


def _guard(text: str, warn: float | None, stop: float | None, action: GuardAction = "skip") -> Any:
    return Field(default=Guard(warn=warn, stop=stop, action=action), description=text)


class GuardsConfig(Section):
    """Thresholds per step. `correlation` and `ess` must not fall below theirs, no other figure may rise above its."""

    act: bool = Field(default=True, description="false: only report the actions")
    rollback_after: int = Field(default=3, ge=1, description="skipped steps in a row that lead to a rollback")
    halt_after: int = Field(default=2, ge=1, description="rollbacks without a good step between them that end the run")
    window: int = Field(default=50, ge=5, description="steps of the gradient norm's median")
    baseline: int = Field(default=20, ge=5, description="first steps of the mismatch's median")
    min_tokens: int = Field(default=256, ge=1, description="tokens below which a mean over tokens is not judged")
    probes: int = Field(
        default=8,
        ge=0,
        description="logprob probes: sequences that engines and trainer score under every version; 0: none",
    )
    lag: Guard = _guard(
        "versions that a trained token lags; stop: the staleness bound, unless given", None, None, "halt"
    )
    kv_lag: Guard = _guard(
        "versions between a token and the oldest keys that it saw; warn: the staleness bound, unless given",
        None,
        None,
        "warn",
    )
    probe_growth: Guard = _guard("an engine's k2 on the logprob probes, over the usual", 3.0, 10.0)
    mismatch_k2: Guard = _guard("k2 between trainer and engine on tokens of one version", 5e-4, 5e-3)
    mismatch_growth: Guard = _guard("that k2 over the median of the first steps", 10.0, None, "warn")
    tail_ln2: Guard = _guard("share of tokens that differ by more than a factor of 2", 1e-3, 1e-2)
    tail_dp: Guard = _guard("share of tokens that differ by more than .1 in probability", 5e-3, 5e-2)
    correlation: Guard = _guard("of the probabilities of trainer and engine", 0.995, 0.97)
    ess: Guard = _guard("effective share of tokens under the importance weights", 0.9, 0.3)
    weight_cut: Guard = _guard("share of importance weights that the loss cut", 0.02, 0.2)
    grad_norm: Guard = _guard("gradient norm over its median", 5.0, 50.0, "rollback")
    zero_variance: Guard = _guard("share of groups that teach nothing", 0.5, 0.9, "warn")
    empty: Guard = _guard("share of episodes that sampled no token", 0.0, None, "warn")
    non_finite: Guard = _guard("1 if the gradient is not finite", None, 0.0)
    routes_missing: Guard = _guard("share of tokens without recorded experts to replay", None, 0.0)
    routes_refused: Guard = _guard("share of recorded experts that are implausible to the trainer", 0.01, 0.1)
    numerics: Guard = _guard("largest difference of a log-probability in deterministic mode", 0.0, None, "warn")

    @pydantic.model_validator(mode="before")
    @classmethod
    def _keep_what_is_not_given(cls, data: Any) -> Any:
        """`mismatch_k2.stop = 0.01` alone leaves the guard's other two values as they are."""
        if not isinstance(data, dict):
            return data
        tables = cast(dict[str, Any], data)
        defaults: dict[str, dict[str, Any]] = {
            name: f.default.model_dump() for name, f in cls.model_fields.items() if f.annotation is Guard
        }
        for name in defaults.keys() & tables.keys():
            if isinstance(tables[name], dict):
                tables = tables | {name: defaults[name] | cast(dict[str, Any], tables[name])}
        return tables


class TrainerConfig(Section):
    """The optimizer, and how a batch is computed."""

    steps: int = Field(default=100, ge=1, description="optimizer steps; the run ends here at the latest")
    minutes: float | None = Field(default=None, gt=0, description="no step starts after this much training time")
    lr: float = Field(default=1e-4, ge=0, description="0 publishes the same weights again: a check of the sync")
    warmup_steps: int = Field(default=2, ge=0, description="steps over which the learning rate rises linearly")
    decay: float = Field(
        default=0.0, ge=0, le=1, description="last share of the run in which the learning rate falls linearly to zero"
    )
    betas: tuple[float, float] = Field(default=(0.9, 0.95), description="decay of AdamW's two moments per step")
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW's, times the learning rate")
    grad_clip: float = Field(default=1.0, gt=0, description="norm to which longer gradients are scaled")
    baseline: Literal["group", "turn"] = Field(
        default="group", description="a reward is compared with the group's, or with those that reached the same turn"
    )
    min_reward_std: float = Field(default=0.0, ge=0, description="groups whose rewards differ less are not trained on")
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="compute; master weights are float32")
    threads: int = Field(default=1, ge=1, description="processor threads of the trainer")
    execution: Literal["auto", "rows", "packed", "streaming", "recompute"] = Field(
        default="auto", description="how sequences that share tokens are computed; auto: by the cost model"
    )
    micro_tokens: int = Field(default=8192, ge=1, description="tokens whose activations are held at a time")
    self_check: bool = Field(
        default=False, description="compare the gradients of an execution with those of separate rows at its first use"
    )
    router_aux: float = Field(default=0.0, ge=0, description="weight of the balance loss of a mixture of experts")
    router_replay: bool = Field(
        default=False, description="record the experts that the engine takes, and train with them (docs/numerics.md)"
    )
    keep_checkpoints: int = Field(default=2, ge=2, description="newest checkpoints that stay on the disk")
    device: str = Field(default="cpu", description="torch device of the trainer, e.g. cuda")


class WeightsConfig(Section):
    """How versions of the weights are published; see docs/weights.md."""

    anchor_share: float = Field(
        default=0.5, gt=0, description="a full copy is written when deltas since the last exceed this share of it"
    )
    anchor_versions: int = Field(
        default=200, ge=1, description="a full copy is written after so many versions at the latest"
    )
    signing_key: LocalPath | None = Field(
        default=None, description="file made by `etude weights keygen`; signs manifests"
    )
    relay: str | None = Field(default=None, description="URL of a relay that the engines take payloads from")


class EvalConfig(Section):
    """Evaluation on the held-out tasks, before and after training."""

    samples: int = Field(default=4, ge=1, description="episodes per task")
    max_tasks: int | None = Field(default=None, ge=1, description="tasks to take, chosen by a hash; all unless given")
    before: bool = Field(default=True, description="measure before training")
    after: bool = Field(default=True, description="measure after training")


class CheatsConfig(Section):
    """Detection of cheating during a run; see docs/sandbox.md."""

    decoys: float = Field(default=0.05, ge=0, le=1, description="share of tasks in whose boxes decoys lie")
    impossible: float = Field(
        default=0.01, ge=0, le=0.5, description="episodes of impossible tasks per training episode; never trained on"
    )
    contrast: bool = Field(default=True, description="withhold the grade of members whose change is unlike the rest's")
    window: int = Field(default=10, ge=3, description="steps over which behaviour is compared with those before")


def _absolute_sources(tasks: TasksConfig) -> TasksConfig:
    paths = {name: getattr(tasks, name) for name in ("repository", "dataset", "edits")}
    return tasks.model_copy(update={name: absolute(p) for name, p in paths.items() if p and "==" not in p})


class RLConfig(Section):
    """Stage "rl": asynchronous reinforcement learning in sandboxes."""

    stage: Literal["rl"] = "rl"
    name: str = Field(default="rl", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="run folder: outputs/NAME")
    seed: int = 1
    deterministic: bool = Field(default=False, description="repeat bit for bit, on-policy")
    store: LocalPath | None = Field(default=None, description="URL for versions and rollouts; default: the run folder")
    ledger: str | None = Field(default=None, description="SQLAlchemy URL; default: ledger.db in the run folder")
    model: ModelConfig = ModelConfig()
    tasks: Annotated[TasksConfig, AfterValidator(_absolute_sources)]
    rollout: RolloutConfig = RolloutConfig()
    sandbox: SandboxConfig = NamespaceSandboxConfig()
    reward: RewardConfig = RewardConfig()
    cheats: CheatsConfig = CheatsConfig()
    loss: LossConfig = LossConfig()
    guards: GuardsConfig = GuardsConfig()
    trainer: TrainerConfig = TrainerConfig()
    inference: InferenceConfig = InferenceConfig()
    weights: WeightsConfig = WeightsConfig()
    eval: EvalConfig = EvalConfig()

    @pydantic.model_validator(mode="before")
    @classmethod
    def _tasks_follow_the_seed(cls, data: Any) -> Any:
        """The run's seed draws the tasks, too, unless `tasks.seed` is given."""
        tasks = data.get("tasks")
        if isinstance(tasks, TasksConfig):
            tasks = tasks.model_dump(exclude_unset=True)
        if not isinstance(tasks, dict):
            return data
        return data | {"tasks": {"seed": data.get("seed", cls.model_fields["seed"].default)} | tasks}

    @pydantic.model_validator(mode="after")
    def _edits_are_one_answer(self) -> RLConfig:
        if self.tasks.edits is not None and self.rollout.documents:
            raise ValueError("tasks.edits are asked without documents: set rollout.documents to false")
        if self.tasks.edits is not None and self.rollout.forks > 1:
            raise ValueError("tasks.edits have one turn, after which there is nothing to fork: drop rollout.forks")
        return self

    @pydantic.model_validator(mode="after")
    def _environments_have_no_repository(self) -> RLConfig:
        refused = {
            "rollout.documents": self.rollout.documents,
            "rollout.agent": self.rollout.agent is not None,
            "rollout.forks": self.rollout.forks > 1,
            "reward.refused_edits": self.reward.refused_edits,
        }
        if self.tasks.environment is not None and (
            name := next((name for name, given in refused.items() if given), None)
        ):
            raise ValueError(f"episodes of tasks.environment have no {name}: drop one of the two")
        return self

    @pydantic.model_validator(mode="after")
    def _only_namespaces_do_everything(self) -> RLConfig:
        """Options that remote boxes do not have are refused before anything is started."""
        for name in ("machine_profiles", "agent"):
            if self.sandbox.type != "namespace" and getattr(self.rollout, name):
                raise ValueError(f'boxes of sandbox.type = "{self.sandbox.type}" cannot give rollout.{name}: drop one')
        return self

    @pydantic.model_validator(mode="after")
    def _deterministic_is_on_policy(self) -> RLConfig:
        if self.deterministic and self.rollout.staleness != 0:
            raise ValueError("deterministic = true needs rollout.staleness = 0")
        if self.deterministic and self.trainer.execution not in ("auto", "rows"):
            raise ValueError("deterministic = true computes sequences one by one: drop trainer.execution")
        if self.deterministic and self.rollout.max_in_flight == "auto":
            raise ValueError("deterministic = true needs a number for rollout.max_in_flight")
        sandbox = self.sandbox
        if self.deterministic and sandbox.type == "namespace" and (sandbox.egress or sandbox.index is not None):
            raise ValueError("deterministic = true cannot ask the network: drop sandbox.egress and sandbox.index")
        if self.deterministic and self.trainer.minutes is not None:
            raise ValueError("deterministic = true cannot stop by the clock: drop trainer.minutes")
        return self

    @pydantic.model_validator(mode="after")
    def _outside_agents_show_less(self) -> RLConfig:
        if self.rollout.agent is not None:
            seen = {"malformed", "truncated", "unfinished"}
            if self.rollout.documents:
                raise ValueError("an outside agent sends no documents: drop rollout.documents")
            if self.reward.refused_edits or set(self.reward.behaviour) - seen:
                raise ValueError(
                    "edits and tests of an outside agent are not seen: drop reward.refused_edits, and of "
                    f"reward.behaviour all but {', '.join(sorted(seen))}"
                )
        return self
