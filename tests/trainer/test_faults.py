"""Eight faults, each injected into a real run: what catches it at the first step it touches, and the doctor's verdict.

Every case trains two healthy steps, then plays the episodes of the third with a fault in the engine, the harness or the
trainer, and lets the real trainer step on them. The same table is in docs/parity.md.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from etude import runfolder
from etude.audit import mismatch
from etude.audit.rescoring import set_weights
from etude.config import RLConfig
from etude.errors import RunFailed, UserError
from etude.inference.engine import cache
from etude.inference.engine.configuration import configuration
from etude.inference.engine.engine import Engine
from etude.models import batch_invariant, gemm
from etude.records import Episode, StopReason
from etude.rollout import engines as of_run
from etude.store import open_store
from etude.trainer.rl.process import Trainer
from etude.weights.content import load
from tests.helpers.trainer_runs import admit, answer, begin_probes, edited, engine_of, flip, new_run, play, step

PROMPTS = 2  # groups per step
VERSION = 2  # that the faulty episodes are sampled by


@dataclass
class Found:
    """What was said of the step with the fault."""

    events: dict[str, dict[str, object]]  # by guard
    halted: str  # the sentence of the failure that ended the run, if one did
    complaints: list[str]  # of the controller, about the engines' configurations
    metrics: dict[str, object] = field(default_factory=dict)


@dataclass
class Case:
    """A run at version 2."""

    run: Path
    config: RLConfig
    trainer: Trainer

    def tensors(self, version: int) -> dict[str, torch.Tensor]:
        return load(open_store(str(self.run / "weights")), version)[1]

    def engine(self, tensors: dict[str, torch.Tensor] | None = None, version: int = VERSION) -> Engine:
        return engine_of(self.config, self.tensors(version) if tensors is None else tensors, version)

    def step(self, episodes: list[Episode], engine: Engine | None) -> Found:
        """One step on these episodes; `engine` is what the probes are asked of."""
        version = self.trainer.version
        for i in range(PROMPTS):
            index = PROMPTS * version + i
            members = [e for e in episodes if e.group_id == index]
            admit(self.run, self.config, index, version, members)
        said = []
        if engine is not None:
            answer(self.run, engine, number=1)
            settings = {
                "http://engine-0": configuration(self.engine(version=version)),
                "http://engine-1": configuration(engine),
            }
            said = of_run.precision_warnings(settings) + of_run.engine_differences(settings)
        halted = ""
        try:
            step(self.trainer, PROMPTS)
        except RunFailed as e:
            halted = str(e)
        line = {} if halted else runfolder.read_jsonl(self.run / "metrics.jsonl")[-1]
        return Found({e["guard"]: e for e in line.get("guard/events", [])}, halted, said, line)

    def verdict(self) -> str:
        """What the doctor says of the newest episodes."""
        return mismatch.diagnose(self.run, pieces=8).cause


def groups(engine: Engine, version: int = VERSION, **options) -> list[Episode]:
    return [e for i in range(PROMPTS) for e in play(engine, PROMPTS * version + i, **options)]


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Healthy runs of two steps, by kind of model, made when they are first asked for."""
    made: dict[str, Path] = {}

    def base(kind: str) -> Path:
        if kind not in made:
            run, config = new_run(
                tmp_path_factory.mktemp(kind),
                kind,
                rollout={"prompts": PROMPTS, "group": 4, "tokens": 40, "context": 128, "staleness": 0},
                guards={"min_tokens": 16},
                trainer={"lr": 5e-3, "warmup_steps": 0, "router_replay": kind == "moe"},
            )
            begin_probes(run)
            case = Case(run, config, Trainer(run))
            for version in range(VERSION):
                engine = case.engine(version=version)
                found = case.step(groups(engine, version, routes=kind == "moe"), engine)
                assert (found.halted, found.complaints) == ("", [])
                assert set(found.events) <= {"grad_norm"}, "the steps before are healthy"
                assert found.metrics["probe/k2"] < 1e-9
            made[kind] = run
        return made[kind]

    return base


@pytest.fixture
def start(bases, tmp_path):
    """Continues a copy of such a run."""

    def started(kind: str = "qwen3") -> Case:
        run = tmp_path / "run"
        shutil.copytree(bases(kind), run)
        return Case(run, runfolder.load_config(run), Trainer(run))

    return started


def test_nothing_is_said_of_a_healthy_step(start):
    case = start()
    engine = case.engine()
    found = case.step(groups(engine), engine)
    assert (found.events, found.halted, found.complaints) == ({}, "", [])
    assert case.verdict() == "healthy"


@dataclass(frozen=True)
class Fault:
    """How a fault is injected: gives the third step's episodes and the engine that played them, and what must catch
    it: guards, the beginning of a halt, or a complaint of the controller."""

    inject: Callable[[Case, pytest.MonkeyPatch], tuple[list[Episode], Engine | None]]
    guards: tuple[str, ...] = ()
    halts: str = ""
    complains: str = ""
    verdict: str = ""
    kind: str = "qwen3"


def stale_weights(case, monkeypatch):
    engine = case.engine(case.tensors(0))
    return groups(engine), engine


def stale_prefix_cache(case, monkeypatch):
    engine = case.engine(version=1)
    groups(engine)  # fills the cache with the keys of version 1
    monkeypatch.setattr(cache.CacheNode, "usable", lambda node, version, session: True)
    set_weights(engine.model, case.tensors(VERSION))
    engine.version = VERSION
    return groups(engine), engine


def one_wrong_tensor(case, monkeypatch):
    name, tensors = "model.layers.1.self_attn.o_proj.weight", case.tensors(VERSION)
    noise = torch.randn(tensors[name].shape, generator=torch.Generator().manual_seed(1))
    engine = case.engine(tensors | {name: tensors[name] + 0.1 * noise})
    return groups(engine), engine


def _pair(episode, at, replace):
    """The token at `at` has become two, which together have its log-probability."""
    ids, mask, logprobs, versions = episode.segments[0].arrays()
    two = np.array([(ids[at] - 7 + 1) % 90 + 7, (ids[at] - 7 + 5) % 90 + 7], "<i4")
    return replace(
        episode,
        ids=np.concatenate([ids[:at], two, ids[at + 1 :]]),
        mask=np.append(mask, np.uint8(1)),
        logprobs=np.concatenate([logprobs[:at], logprobs[[at, at]] / 2, logprobs[at + 1 :]]).astype("<f4"),
        versions=np.append(versions, versions[-1:]),
    )


def _rewritten(episode, **arrays):
    """The blob after something rewrote its arrays: unlike `edited`, under the digest of what was sampled."""
    changed = {name: array.tobytes() for name, array in arrays.items()}
    return msgspec.structs.replace(episode, segments=(msgspec.structs.replace(episode.segments[0], **changed),))


def tokenised_again_in_the_harness(case, monkeypatch):
    engine = case.engine()
    return [_pair(e, 36, edited) if i % 2 else e for i, e in enumerate(groups(engine))], engine


def tokenised_again_in_the_blob(case, monkeypatch):
    engine = case.engine()
    episodes = groups(engine)
    return [*episodes[:-1], _pair(episodes[-1], 36, _rewritten)], engine


def sampled_with(**options):
    def inject(case, monkeypatch):
        engine = case.engine()
        return groups(engine, **options), engine

    return inject


def narrow(hidden, weight):
    return torch.nn.functional.linear(hidden.bfloat16(), weight.bfloat16()).float()


def narrow_head(case, monkeypatch):
    engine, wide = case.engine(), batch_invariant.head
    own = engine.model.get_output_embeddings().weight.data_ptr()
    for module in (batch_invariant, gemm):
        monkeypatch.setattr(module, "head", lambda h, w: (narrow if w.data_ptr() == own else wide)(h, w))
    return groups(engine), engine


def dropped_replay(case, monkeypatch):
    engine = case.engine()
    flip(engine.model)
    return groups(engine), None


def scored_failure(case, monkeypatch):
    engine = case.engine()
    episodes = groups(engine)
    lost = {"segments": (), "stop_reason": StopReason.ERROR, "detail": "EngineError: gone", "reward": 0.0}
    return [*episodes[:-1], msgspec.structs.replace(episodes[-1], **lost)], engine


def scored_silence(case, monkeypatch):
    engine = case.engine()
    episodes = groups(engine)
    mute = {"segments": (), "stop_reason": StopReason.SECONDS, "reward": 0.0, "metrics": {}}
    return [*episodes[:-1], msgspec.structs.replace(episodes[-1], **mute)], engine


FAULTS = {
    "stale weights": Fault(stale_weights, ("probe_growth", "mismatch_k2"), verdict="weights"),
    "stale prefix cache": Fault(stale_prefix_cache, ("kv_lag", "mismatch_k2"), verdict="cache"),
    "one wrong tensor": Fault(one_wrong_tensor, ("probe_growth", "mismatch_k2"), verdict="weights"),
    "tokenised again, harness": Fault(
        tokenised_again_in_the_harness, ("mismatch_k2", "tail_ln2", "tail_dp"), verdict="tokens"
    ),
    "tokenised again, blob": Fault(
        tokenised_again_in_the_blob, halts="episode 5-3-0 does not hold the tokens", verdict="tokens"
    ),
    "temperature": Fault(sampled_with(temperature=0.8), ("mismatch_k2",), verdict="tokens"),
    "top-p": Fault(sampled_with(top_p=0.9), ("mismatch_k2",), verdict="tokens"),
    "bfloat16 head": Fault(narrow_head, complains="head is narrower than float32", verdict="kernel"),
    "dropped replay": Fault(dropped_replay, ("routes_missing",), verdict="routing", kind="moe"),
    "failure scored": Fault(scored_failure, halts="episode 5-3-0 was lost to infrastructure", verdict="infra"),
    "silence scored": Fault(scored_silence, ("empty",), verdict="infra"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught_at_its_first_step_and_named(start, monkeypatch, name):
    fault = FAULTS[name]
    case = start(fault.kind)
    with monkeypatch.context() as patch:
        episodes, engine = fault.inject(case, patch)
        found = case.step(episodes, engine)
    assert set(fault.guards) <= set(found.events), found
    assert found.halted.startswith(fault.halts)
    assert bool(found.halted) == bool(fault.halts)
    said = found.complaints
    assert all(fault.complains in sentence for sentence in said) if fault.complains else not said
    assert bool(said) == bool(fault.complains)
    if "probe_growth" in fault.guards:
        sentence = found.events["probe_growth"]["sentence"]
        assert "the engine at http://engine-1 scores the probes of version 2" in sentence
    assert case.verdict() == fault.verdict


def test_a_trainer_with_a_narrow_head_does_not_start(tmp_path, monkeypatch):
    run, _ = new_run(tmp_path)
    monkeypatch.setattr(batch_invariant, "head", narrow)
    with pytest.raises(UserError, match=r"differs from transformers' own forward pass by .* nats in its trial"):
        Trainer(run)
