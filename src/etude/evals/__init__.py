"""Evaluations: suites, and the statistics that tell whether one model does better than another.

The room plays episodes through rollout and asks engines for answers; it starts no processes and knows no runs. Public:
`suite.evaluate`, `suite.compare` and the functions of `stats`.
"""
