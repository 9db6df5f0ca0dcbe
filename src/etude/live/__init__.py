"""The live loop: what users do with the answers of the served model trains its next version.

    observe ->  gateway  ->  log  ->  learn (labels, advantages, trainer)  ->  release (gate, canary, stores)

`legs` does these by itself. Imports go downwards: simulate, legs, release, learn, gateway, log; `observe` imports
`log` alone.
"""

PUBLIC = (
    "gateway",
    "learn",
    "legs",
    "log.accounts",
    "log.privacy",
    "log.records",
    "log.tenants",
    "observe",
    "release.operations",
    "release.overview",
    "simulate.demo",
    "simulate.figures",
)
