"""Stage "rl": the tables of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, cast

import pydantic
from pydantic import AfterValidator, Field

from etude.config.catalogue import pretrained
from etude.config.engine import InferenceConfig
from etude.config.sandbox import NamespaceSandboxConfig, SandboxConfig
from etude.config.sections import (
    NAME,
    ChatTemplateOrNone,
    LocalPath,
    LocalPathOrLook,
    ModelPath,
    ModelPathOrSelf,
    Section,
    absolute,
    bundled,
    option,
)
from etude.config.tasks import TasksConfig, TaskSource
from etude.records import Budget


class ModelConfig(Section):
    """The model that is trained."""

    path: ModelPath = option("nano", "HF folder, GGUF file, or the name of a model such as nano", validate_default=True)
    chat_template: ChatTemplateOrNone = option(None, "in place of the model's own: a Jinja file, or chatml-hermes")
    origin: str | None = option(None, "written by etude: the file from which `path` was made in the user's cache")
    dialect: str = option("auto", "how tool calls are written; auto: as the chat template writes them")
    chat_template_kwargs: dict[str, Any] = option({}, "variables of the chat template, e.g. enable_thinking = false")

    @property
    def name(self) -> str:
        """The name of a bundled or a pretrained model, else the folder."""
        path = Path(self.origin or self.path)
        if (known := pretrained(path)) is not None:
            return known.name
        return path.name if bundled(f"models/{path.name}") == path else str(path)


class AgentConfig(Section):
    """An outside agent, which runs in the box in place of the built-in loop (docs/harness.md)."""

    command: str = Field(min_length=1, description="shell command that starts the agent; $TASK is the instruction")
    folder: LocalPath | None = option(None, "the agent's program; boxes have it at /opt/agent")
    environment: dict[str, str] = option({}, "variables besides those of the endpoint; $NAME: from etude's environment")
    memory_mb: int = option(4096, "memory of a box, also the address space of a process", ge=64)
    processes: int = option(128, "processes and threads of a box", ge=1)


class RolloutConfig(Section):
    """Sampling of episodes."""

    prompts: int = option(16, "P: groups per optimizer step", ge=1)
    group: int = option(16, "G: episodes per group", ge=2)
    staleness: int = option(1, "O: versions a token may lag when trained on; 0 is on-policy", ge=0)
    max_in_flight: int | Literal["auto"] = option(128, "live episodes; auto: enough for busy engines (docs/async.md)")
    temperature: float = option(1.0, "of sampling; engines take less for 0", ge=1e-4)
    turns: int = Field(default=6, ge=1)
    tokens: int = option(320, "sampled tokens of an episode", ge=1)
    turn_tokens: int | None = option(None, "sampled tokens of a turn; none: as many as the episode has left", ge=1)
    thinking_budget: int | None = option(
        None, "sampled tokens of a turn after which an open thought is closed; none: no limit", ge=1
    )
    context: int = option(1024, "prompt and sampled tokens of an episode, or of a segment", ge=64)
    summarise_at: int = option(0, "tokens of a segment after which a summary begins a new one; 0: never", ge=0)
    summary_tokens: int = option(512, "sampled tokens of a summary, at most", ge=1)
    seconds: float = option(600.0, "wall time of an episode; a short one lets a busy machine decide", gt=0)
    documents: bool = option(False, "show open files, reads and searches as documents (docs/documents.md)")
    tools: tuple[str, ...] = option((), "the agent's tools, by name (docs/harness.md); empty: all")
    custom_tools: tuple[str, ...] = option((), 'Python functions that are tools, too, each "module:name"')
    apply: str | None = option(None, "URL of a server that applies the agent's edit sketches; none: they are merged")
    agent: AgentConfig | None = option(None, "an outside agent in place of the built-in loop")
    machine_profiles: LocalPathOrLook | None = option(
        None,
        'fingerprints (.jsonl) or a description (.toml) of machines that boxes imitate; "image": containers of the '
        'image; "none": no machine',
    )
    stall_seconds: float = option(
        300.0, "without progress until its cause is printed; five times as long ends the run", gt=0
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
    def _a_thought_leaves_room(self) -> RolloutConfig:
        budget, turn = self.thinking_budget, min(self.turn_tokens or self.tokens, self.tokens)
        if budget is not None and budget >= turn:
            raise ValueError(
                f"rollout.thinking_budget = {budget} leaves nothing of the {turn} tokens of a turn: lower it, or raise "
                f"rollout.{'turn_tokens' if turn < self.tokens else 'tokens'}"
            )
        if budget is not None and self.summarise_at and budget >= self.summary_tokens:
            raise ValueError(
                f"rollout.thinking_budget = {budget} leaves nothing of the {self.summary_tokens} tokens of a summary: "
                "lower it, or raise rollout.summary_tokens"
            )
        if budget is not None and self.agent is not None:
            raise ValueError("rollout.thinking_budget is for the built-in loop: drop it, or rollout.agent")
        return self

    def budget(self) -> Budget:
        """The budget of an episode whose task sets none."""
        return Budget(turns=self.turns, tokens=self.tokens, context=self.context, seconds=self.seconds)


class LengthCost(Section):
    """Composer's cost of effort: concave and increasing in x, a weighted sum of tokens, calls and turns."""

    weight: float = option(0.0, "factor of the cost in the reward; 0: off", ge=0)
    k: float = option(0.01, "where the cost begins to bend: at x = 1 / k", gt=0)
    q: float = option(1.0, "how strongly it bends; 0: linear, 1: logarithm", ge=0)
    thinking: float = option(1.0, "weight of a sampled token inside <think>", ge=0)
    calling: float = option(1.0, "weight of another sampled token of a turn that calls tools", ge=0)
    final: float = option(1.0, "weight of another sampled token of a turn without a call", ge=0)
    output: float = option(0.0, "weight of a token that a tool put into the context", ge=0)
    calls: float = option(0.0, "weight of a tool call", ge=0)
    turns: float = option(0.0, "weight of a turn", ge=0)


Behaviour = Literal[
    "edit_errors", "malformed", "repeats", "summary_errors", "tests_failed", "todo_open", "truncated", "undo",
    "unfinished", "untested",
]  # fmt: skip


def _several(value: Any) -> Any:
    return () if value is None else (value,) if isinstance(value, str) else value


class RewardConfig(Section):
    """Costs that are subtracted from the grade of an episode."""

    refused_edits: float = option(0.0, "cost of edits without a change, times their share of all edits", ge=0, le=1)
    length: LengthCost = LengthCost()
    overlong: int = option(0, "last tokens of the budget over which the cost rises to 1 (DAPO)", ge=0)
    custom: Annotated[tuple[str, ...], pydantic.BeforeValidator(_several)] = option(
        (), 'functions "module:name", one or a list: each takes an Episode and returns a number that is added'
    )
    behaviour: dict[Behaviour, Annotated[float, Field(ge=0)]] = option(
        {}, "cost of each occurrence of a behaviour; at most 0.5 in all"
    )

    @pydantic.field_validator("custom")
    @classmethod
    def _components_have_names(cls, paths: tuple[str, ...]) -> tuple[str, ...]:
        names = [path.rpartition(":")[2] for path in paths]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"there are two functions called {twice[0]}, the name of their metrics: rename one")
        return paths


Mask = Literal["ipo", "dppo", "geo_rs", "opsm", "veto"]


class LossConfig(Section):
    """The loss: a preset, and values that replace parts of it. See docs/losses.md."""

    preset: Literal[
        "composer2", "fireworks", "grpo", "dr_grpo", "dapo", "tis", "icepop", "cispo", "gspo", "ppo"
    ] = option("composer2", "row of the table of losses")  # fmt: skip
    custom: str | None = option(
        None, "MODULE:FUNCTION from trainer.rl.loss.LossTokens to the loss of every token; all else is the preset's"
    )
    kl: Literal["none", "k1", "k2", "k3"] | None = option(None, "estimator of the KL to version 0")
    kl_beta: float | None = option(None, "its weight; 0 saves the reference model's pass", ge=0)
    clip_low: float | None = option(None, "minimum ratio to the proximal policy", ge=0)
    clip_high: float | None = option(None, "greatest ratio to the proximal policy", ge=1)
    anchor: Literal["proximal", "rollout"] | None = option(None, "policy that the ratio is taken against")
    correction: Literal["none", "truncate", "band"] | None = option(
        None, "weight of proximal against rollout policy: none, cut at the cap, or 0 outside a band"
    )
    cap_high: float | None = option(None, "greatest importance weight of the correction", ge=1)
    masks: tuple[Mask, ...] = option((), "tokens and episodes to leave out; combine with any preset")
    updates: int = option(1, "optimizer updates per batch, each on a share of its groups", ge=1)
    lam: float = option(0.95, "ppo: lambda of generalised advantage estimation", ge=0, le=1)


class OnPolicyDistillConfig(Section):
    """A teacher judges the tokens that the model itself has sampled; see docs/losses.md."""

    teacher: ModelPathOrSelf = option("self", "self: the same weights, with the episode's hint; or a model folder")
    weight: float = option(1.0, "of the teacher's log-ratio in a token's advantage", gt=0)
    clip: float = option(1.0, "bound of a token's log-ratio", gt=0)
    cap: float = option(20.0, "bound of the sum of a segment's absolute log-ratios; beyond it all shrink", gt=0)
    share: float = option(0.25, "share of a batch's episodes that are judged, at most", gt=0, le=1)


GuardAction = Literal["warn", "skip", "rollback", "halt"]


class Guard(Section):
    """Two thresholds on a figure; beyond `stop` the run takes `action`. A missing threshold is never crossed."""

    warn: float | None = option(None, "threshold beyond which the step is reported")
    stop: float | None = option(None, "threshold beyond which the action is done")
    action: GuardAction = option("skip", "report, drop the gradients, go back to the last good version, or end the run")


def _guard(text: str, warn: float | None, stop: float | None, action: GuardAction = "skip") -> Any:
    return Field(default=Guard(warn=warn, stop=stop, action=action), description=text)


class GuardsConfig(Section):
    """Thresholds per step. `correlation` and `ess` must not fall below theirs; all other figures must not rise above
    theirs."""

    act: bool = option(True, "false: only report the actions")
    halt_after: int = option(2, "rollbacks without a good step between them that end the run", ge=1)
    window: int = option(50, "steps of the gradient norm's median", ge=5)
    baseline: int = option(20, "first steps of the mismatch's median", ge=5)
    min_tokens: int = option(256, "tokens; fewer are judged as if the rest agreed exactly", ge=1)
    probes: int = option(8, "logprob probes: sequences that all score under every version; 0: none", ge=0, le=256)
    lag: Guard = _guard("versions a trained token lags; stop: the staleness bound, unless given", None, None, "halt")
    kv_lag: Guard = _guard(
        "versions between a token and the oldest keys it saw; warn: the staleness bound, unless given",
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
    zero_variance: Guard = _guard("share of groups without a gradient", 0.5, 0.9, "warn")
    empty: Guard = _guard("share of episodes that sampled no token", 0.0, None, "warn")
    non_finite: Guard = _guard("1 if the gradient is not finite", None, 0.0)
    routes_missing: Guard = _guard("share of tokens without recorded experts to replay", None, 0.0)
    routes_refused: Guard = _guard("share of recorded experts that are implausible to the trainer", 0.01, 0.1)
    numerics: Guard = _guard("largest difference of a log-probability in deterministic mode", 0.0, None, "warn")

    @pydantic.model_validator(mode="before")
    @classmethod
    def _merge_partial_guards(cls, data: Any) -> Any:
        """`mismatch_k2.stop = 0.01` alone leaves the guard's other two values at their defaults."""
        if not isinstance(data, dict):
            return data
        tables = cast(dict[str, Any], data)
        fields = {n: f.default for n, f in cls.model_fields.items() if f.annotation is Guard and n in tables}
        return tables | {n: d.model_dump() | tables[n] for n, d in fields.items() if isinstance(tables[n], dict)}


class LoraConfig(Section):
    """Low-rank adapters in place of all weights; see docs/memory.md."""

    rank: int = option(16, "of the product that is added to a weight", ge=1)
    alpha: float = option(32.0, "the product is multiplied by alpha / rank", gt=0)
    targets: Literal["all-linear"] | tuple[str, ...] = option(
        "all-linear", 'names of layers such as "q_proj" or "experts.down_proj"; all-linear: linear layers but the head'
    )


class MeshConfig(Section):
    """The ranks of a trainer: replicate x shard x context processes, each with a device of its own."""

    replicate: int = option(1, "copies of the sharded model, each with a part of the batch", ge=1)
    shard: int = option(1, "ranks with a part of each tensor and of the batch (FSDP2)", ge=1)
    expert: int = option(1, "ranks with a part of the experts; divides shard x context", ge=1)
    context: int = option(1, "ranks with a part of each row (Ulysses); divides the model's attention heads", ge=1)

    @pydantic.model_validator(mode="after")
    def _experts_lie_on_the_ranks_of_one_copy(self) -> MeshConfig:
        if self.shard * self.context % self.expert:
            raise ValueError(
                f"trainer.mesh.expert = {self.expert} must divide shard x context = {self.shard * self.context}"
            )
        return self

    @property
    def ranks(self) -> int:
        """The number of processes."""
        return self.replicate * self.shard * self.context

    @property
    def data_ranks(self) -> int:
        """The number of parts of a batch."""
        return self.replicate * self.shard


def check_device_of_ranks(device: str, mesh: MeshConfig) -> None:
    """Raises ValueError for the name of a single GPU as that of several ranks."""
    if ":" in device and mesh.ranks > 1:
        kind = device.partition(":")[0]
        raise ValueError(
            f'trainer.device = "{device}" is one device, and trainer.mesh has {mesh.ranks} ranks, which take those '
            f'from {kind}:0 on: set "{kind}"'
        )


class TrainerConfig(Section):
    """The optimizer, and the computation of a batch."""

    steps: int = option(100, "optimizer steps; the run ends here at the latest", ge=1)
    minutes: float | None = option(None, "no step starts after this much training time", gt=0)
    lr: float = option(1e-4, "0 publishes the same weights again: a check of the sync", ge=0)
    warmup_steps: int = option(2, "steps over which the learning rate rises linearly", ge=0)
    decay: float = option(0.0, "last share of the run in which the learning rate falls linearly to zero", ge=0, le=1)
    betas: tuple[float, float] = option((0.9, 0.95), "decay of AdamW's two moments per step")
    weight_decay: float = option(0.0, "AdamW's, times the learning rate", ge=0)
    grad_clip: float = option(1.0, "norm to which longer gradients are scaled", gt=0)
    baseline: Literal["group", "turn", "given"] = option(
        "group",
        "a reward is compared with the group's, or with those that reached the same turn; given: episodes come with "
        "their advantages (`etude live train`)",
    )
    min_reward_std: float = option(0.0, "groups whose rewards differ less are not trained on", ge=0)
    dtype: Literal["float32", "bfloat16"] = option("float32", "compute; master weights are float32")
    lora: LoraConfig | None = option(None, "train adapters (LoRA), not the weights")
    threads: int = option(1, "processor threads of the trainer", ge=1)
    execution: Literal["auto", "rows", "packed", "streaming", "recompute"] = option(
        "auto", "how sequences that share tokens are computed; auto: by the cost model"
    )
    micro_tokens: int = option(8192, "tokens whose activations are held at a time", ge=1)
    self_check: bool = option(False, "compare an execution's gradients with those of separate rows at its first use")
    router_aux: float = option(0.0, "weight of the balance loss of a mixture of experts", ge=0)
    router_replay: bool = option(False, "record the engine's experts, and train with them (docs/numerics.md)")
    activation_checkpointing: bool = option(False, "of a layer keep its input alone, and compute the rest again")
    offload_activations: bool = option(False, "these inputs of layers wait in the host's memory; needs a GPU")
    offload_optimizer: bool = option(False, "master weights and moments are in the host's memory; needs a GPU")
    device_memory_gb: float | None = option(
        None, "GiB of a GPU that the run must fit into; by default, those of the machine's GPU", gt=0
    )
    checkpoint_every: int = option(1, "versions from one checkpoint to the next; a resume computes those since", ge=1)
    keep_checkpoints: int = option(2, "newest checkpoints that stay on the disk", ge=2)
    device: str = option("cpu", "torch device of the trainer, e.g. cuda")
    mesh: MeshConfig = option(MeshConfig(), "ranks that train together (docs/ranks.md)")
    launcher: Literal["local", "external"] = option(
        "local", "who starts the ranks: the run, on its machine, or torchrun, SLURM or Ray by the command it prints"
    )
    collective_seconds: float = option(600.0, "deadline of a rank's wait for the other ranks", gt=0)

    @pydantic.model_validator(mode="after")
    def _offload_leaves_a_gpu(self) -> TrainerConfig:
        for name in ("offload_activations", "offload_optimizer"):
            if getattr(self, name) and self.device == "cpu":
                raise ValueError(f'trainer.device = "cpu" is the host: drop trainer.{name}')
        if self.offload_activations and not self.activation_checkpointing:
            raise ValueError("trainer.offload_activations needs trainer.activation_checkpointing = true")
        return self

    @pydantic.model_validator(mode="after")
    def _ranks_do_less(self) -> TrainerConfig:
        if self.mesh.ranks == 1:
            return self
        if self.execution in ("streaming", "recompute"):
            raise ValueError(
                f'trainer.execution = "{self.execution}" is for one rank, and trainer.mesh has {self.mesh.ranks}: set '
                '"packed" or "rows", or drop trainer.mesh'
            )
        if self.self_check:
            raise ValueError(
                f"trainer.self_check compares passes of one rank, and trainer.mesh has {self.mesh.ranks}: drop one of "
                "the two"
            )
        check_device_of_ranks(self.device, self.mesh)
        return self


class WeightsConfig(Section):
    """Publication of versions of the weights; see docs/weights.md."""

    anchor_share: float = option(0.5, "a full copy is written when deltas since the last exceed this share of it", gt=0)
    anchor_versions: int = option(200, "a full copy is written after so many versions at the latest", ge=1)
    anchor_first: bool = option(
        False, "write a full copy of version 0, for readers without the model folder; false: readers load the folder"
    )
    seconds: float | None = option(
        None,
        "deadline of a version's publication, and of its arrival at all engines; none: 900 and 120 (vLLM: 1,800) "
        "seconds, and 30 more for each GB of the model",
        gt=0,
    )
    signing_key: LocalPath | None = option(None, "file made by `etude weights keygen`; signs manifests")
    relay: str | None = option(None, "URL of a relay that the engines take payloads from")

    @pydantic.field_validator("relay")
    @classmethod
    def _relays_take_tokens(cls, value: str | None) -> str | None:
        if value is not None and "@" in value.partition("://")[2].partition("/")[0]:
            raise ValueError("a relay asks for a token, which engines have from their environment: no user in its URL")
        return value


class EvalConfig(Section):
    """Evaluation on the held-out tasks, before and after training."""

    samples: int = option(4, "episodes per task", ge=1)
    max_tasks: int | None = option(None, "tasks to take, chosen by a hash; all unless given", ge=1)
    before: bool = option(True, "measure before training")
    after: bool = option(True, "measure after training")


class CheatsConfig(Section):
    """Detection of cheating during a run; see docs/sandbox.md."""

    decoys: float = option(0.05, "share of tasks in whose boxes decoys lie", ge=0, le=1)
    impossible: float = option(0.01, "episodes of impossible tasks per training episode,; not trained on", ge=0, le=0.5)
    contrast: bool = option(True, "withhold the grade of members whose change is unlike the rest's")
    window: int = option(10, "steps whose behaviour is compared with that of the steps before", ge=3)


def _absolute_sources(tasks: TasksConfig) -> TasksConfig:
    sources = tuple(source.model_copy(update=_absolute_paths(source)) for source in tasks.sources)
    return tasks.model_copy(update=_absolute_paths(tasks) | {"sources": sources})


def _absolute_paths(source: TaskSource) -> dict[str, str]:
    paths = {name: getattr(source, name, None) for name in ("repository", "dataset", "harbor", "edits")}
    return {name: absolute(path) for name, path in paths.items() if path and "==" not in path}


class RLConfig(Section):
    """Stage "rl": asynchronous reinforcement learning in sandboxes."""

    stage: Literal["rl"] = "rl"
    name: str = option("rl", "run folder: outputs/NAME", pattern=NAME)
    seed: int = 1
    deterministic: bool = option(False, "repeat bit for bit, on-policy")
    store: LocalPath | None = option(None, "URL for versions and rollouts; default: the run folder")
    ledger: str | None = option(None, "SQLAlchemy URL; default: ledger.db in the run folder")
    model: ModelConfig = ModelConfig()
    tasks: Annotated[TasksConfig, AfterValidator(_absolute_sources)]
    rollout: RolloutConfig = RolloutConfig()
    sandbox: SandboxConfig = NamespaceSandboxConfig()
    reward: RewardConfig = RewardConfig()
    cheats: CheatsConfig = CheatsConfig()
    loss: LossConfig = option(LossConfig(), "the loss; null values are those of the preset (docs/losses.md)")
    distill: OnPolicyDistillConfig | None = option(None, "also learn from a teacher")
    guards: GuardsConfig = GuardsConfig()
    trainer: TrainerConfig = TrainerConfig()
    inference: InferenceConfig = InferenceConfig()
    weights: WeightsConfig = WeightsConfig()
    eval: EvalConfig = EvalConfig()

    @pydantic.model_validator(mode="before")
    @classmethod
    def _tasks_follow_the_seed(cls, data: Any) -> Any:
        """The run's seed also draws the tasks, unless `tasks.seed` is set."""
        tasks = data.get("tasks")
        if isinstance(tasks, TasksConfig):
            tasks = tasks.model_dump(exclude_unset=True)
        if not isinstance(tasks, dict):
            return data
        return data | {"tasks": {"seed": data.get("seed", cls.model_fields["seed"].default)} | tasks}

    @pydantic.model_validator(mode="after")
    def _edits_are_one_answer(self) -> RLConfig:
        if self.tasks.edits is not None and self.rollout.documents:
            raise ValueError("tasks.edits have prompts without documents: set rollout.documents to false")
        return self

    @pydantic.model_validator(mode="after")
    def _environments_have_no_documents(self) -> RLConfig:
        refused = {
            "rollout.documents": self.rollout.documents,
            "reward.refused_edits": self.reward.refused_edits,
        }
        if self.tasks.environment is not None and (
            name := next((name for name, used in refused.items() if used), None)
        ):
            raise ValueError(f"episodes of tasks.environment have no {name}: drop one of the two")
        return self

    @pydantic.model_validator(mode="after")
    def _something_is_held_out(self) -> RLConfig:
        tasks, measured = self.tasks, self.eval.before or self.eval.after
        held_out = any(source.dataset or source.heldout_fraction for source in tasks.sources or (tasks,))
        if tasks.of_repositories and measured and not held_out:
            raise ValueError(
                "tasks.heldout_fraction = 0 leaves no tasks to measure on: raise it for one source at least, or set "
                "eval.before and eval.after to false"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _only_namespaces_do_everything(self) -> RLConfig:
        """Options that remote boxes lack are refused before anything is started."""
        for name in ("machine_profiles", "agent"):
            if self.sandbox.type != "namespace" and getattr(self.rollout, name):
                raise ValueError(f'boxes of sandbox.type = "{self.sandbox.type}" cannot give rollout.{name}: drop one')
        return self

    @pydantic.model_validator(mode="after")
    def _a_value_head_replaces_advantages(self) -> RLConfig:
        if self.loss.preset == "ppo" and (self.trainer.baseline == "given" or self.distill is not None):
            raise ValueError('loss.preset = "ppo" computes all advantages itself: drop trainer.baseline and distill')
        return self

    @pydantic.model_validator(mode="after")
    def _a_folder_that_teaches_has_no_adapters(self) -> RLConfig:
        if self.distill is not None and self.distill.teacher != "self" and self.trainer.lora is not None:
            raise ValueError("distill.teacher is a folder of whole weights: drop trainer.lora")
        return self

    @pydantic.model_validator(mode="after")
    def _recorded_advantages_need_no_schedule(self) -> RLConfig:
        if self.trainer.baseline == "given" and (self.trainer.minutes is not None or self.trainer.decay):
            raise ValueError('trainer.baseline = "given" ends with its batch: drop trainer.minutes and trainer.decay')
        return self

    @pydantic.model_validator(mode="after")
    def _deterministic_is_on_policy(self) -> RLConfig:
        if self.deterministic and self.rollout.staleness != 0 and self.trainer.baseline != "given":
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
    def _other_engines_do_less(self) -> RLConfig:
        """Options that only etude's engine has are refused before anything is started."""
        engine, inference = self.inference.engine, self.inference
        if self.deterministic and (engine != "etude" or inference.urls):
            raise ValueError("deterministic = true needs servers of etude's engine that the run starts: drop inference")
        if engine == "etude":
            return self
        needs = 'needs inference.engine = "etude"'
        if self.rollout.documents:
            raise ValueError(f"rollout.documents {needs}: {engine} computes no documents")
        if self.rollout.temperature < 0.01:
            raise ValueError(f"rollout.temperature below 0.01 {needs}: {engine} samples as if it were higher")
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
