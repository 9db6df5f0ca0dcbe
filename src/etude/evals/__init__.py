"""Evaluations: suites, and the statistics that show whether one model does better than another.

The room plays episodes through rollout and requests answers from engines. It starts no processes and does not read
runs.
"""

PUBLIC = ("document_suite", "fast_apply", "sequential", "stats", "suite")
