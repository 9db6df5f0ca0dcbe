"""One episode and its group: admission, the agent that plays, and the reward.

    admission, curriculum, concurrency   when the next groups start, on which tasks, and how many episodes are live
    episode                              one episode, by the agent loop or an outside agent
    environments/                        what is played: code tasks, foreign folders, applied edits, users' Python
    rewards, group_audit                 the reward of an episode, and the audit of a complete group
    probes, engines, stall, drift        checks of engines, of progress and of behaviour while a run goes on
    journal, journal_seams               an episode goes on after a kill: its tokens, and the results of its commands
    traces, pull_requests, agreement     conversations to learn from: of answers, of pull requests, of agreeing rollouts
    replay                               a recorded episode played again, token by token

Imports harness, grading, tasks, sandbox, protocol and the rooms below; no torch.
"""

# pyright: reportUnusedImport=false
from etude.rollout.admission import groups_to_admit
from etude.rollout.agreement import CHANGE_TOOLS, KINDS, AgreedPair, ChangeTarget, LeftOut, RepositoryTree, agreed_pair
from etude.rollout.concurrency import Concurrency, episode_concurrency
from etude.rollout.curriculum import Curriculum, MixedCurriculum
from etude.rollout.drift import BehaviourDrift, Shift
from etude.rollout.engines import EngineConfiguration, engine_differences, precision_warnings
from etude.rollout.environments.agent import Agent, check_agent, open_agent
from etude.rollout.environments.code import dataset_part, foreign_refusal
from etude.rollout.environments.edits import applied_edits
from etude.rollout.environments.environment import Environment, EnvironmentEpisode, reward
from etude.rollout.environments.taskset import TaskPart, Taskset, mix, task_part
from etude.rollout.episode import EpisodeId, RolloutContext, run_episode
from etude.rollout.group_audit import audit_group
from etude.rollout.journal import EpisodeJournal, open_journal, sweep_journals
from etude.rollout.probes import (
    PROBE_TOKENS,
    PROBES_KEPT,
    ProbeScorer,
    ProbeSequences,
    make_probe_sequences,
    read_probe_sequences,
    reset_probes,
    take_probe_results,
)
from etude.rollout.pull_requests import PullRequest, pull_request_rows, read_pull_requests
from etude.rollout.replay import replay_episode
from etude.rollout.rewards import custom_component
from etude.rollout.stall import STALL_LIMIT, StallSnapshot, StallWatchdog, diagnose_stall
from etude.rollout.traces import TRACE_TOOLS, gold_edit, record_trace

PUBLIC = ("",)
