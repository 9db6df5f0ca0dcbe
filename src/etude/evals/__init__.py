"""Evaluations: suites, and the statistics that show whether one model does better than another.

The room plays episodes through rollout and requests answers from engines. It starts no processes and does not read
runs.
"""

from etude.evals.online import PastTest, level_of
from etude.evals.paired import clustered_score, defended_margin, needed_score
from etude.evals.readiness import readiness_of
from etude.evals.sequential import (
    LookPlan,
    accounts_per_arm,
    alpha_of_slot,
    log_evidence,
    mixture_evidence,
    plan_looks,
    ratio_evidence,
    ratio_p_value,
    sequence_reach,
)
from etude.evals.stats import Estimate, mean_difference
from etude.evals.suite import EvalResult, TaskResult, compare, evaluate

PUBLIC = ("", "document_suite", "fast_apply")
