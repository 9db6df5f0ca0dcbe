"""The consent of a request, decided before content is written: by the tenant's policy, the client's header, and
tombstones.

X-Etude-Consent: train      grants, if the tenant lets its clients grant
X-Etude-Consent: none       refuses, always, and withdraws what the account gave before (`withdrawals.py`)
"""

from __future__ import annotations

from etude.live.log.records import Consent, LivePolicy

HEADER = "x-etude-consent"
SCOPE = "train"


def decide(policy: LivePolicy, header: str | None, forgotten: bool, at: int) -> Consent:
    """The consent of one request at `at`, in nanoseconds. A header of any other value refuses."""
    if forgotten:
        return Consent(policy="tombstone", at=at)
    if header is None:
        return (
            Consent(granted=True, scope=SCOPE, policy="tenant", at=at)
            if policy.consent
            else Consent(policy="tenant", at=at)
        )
    if header.strip().lower() == SCOPE and (policy.consent or policy.may_grant):
        return Consent(granted=True, scope=SCOPE, policy="header", at=at)
    return Consent(policy="header", at=at)
