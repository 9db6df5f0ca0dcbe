"""The live loop: what users do with the answers of the served model trains its next version.

    observe ->  gateway  ->  log  ->  learn (labels, advantages, trainer)  ->  release (gate, canary, stores)

Folders import downwards: simulate, release, learn, gateway, log; `observe` imports `log` alone.
"""

PUBLIC = (
    "gateway",
    "learn",
    "log.accounts",
    "log.privacy",
    "log.records",
    "log.tenants",
    "observe",
    "release",
    "release.operations",
    "simulate.demo",
)
