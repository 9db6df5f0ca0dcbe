"""The keys of a request: the API key of a tenant, and the operator's token for /health and /metrics."""

from __future__ import annotations

import hmac

from starlette.types import Scope

from etude.live.log.tenants import ApiKey, Directory
from etude.protocol import Refusal, bearers

_OPERATOR_PATHS = ("/health", "/metrics")


class KeyCheck:
    """Checks requests against the keys of `directory` and, on the operator's routes, `token`."""

    def __init__(self, directory: Directory, token: str | None) -> None:
        self._directory = directory
        self._token = token

    def authorise(self, scope: Scope) -> None:
        """Raises Refusal for a request without a valid key, or with a key that has made too many requests."""
        if scope["path"] in _OPERATOR_PATHS:
            if self._token is not None and not any(_equal(bearer, self._token) for bearer in bearers(scope)):
                raise Refusal(401, "the operator's token is needed", "invalid_api_key")
            return
        key = self.key(scope)
        if scope["method"] == "POST" and (wait := self._directory.wait(key)):
            after = {"retry-after": str(max(1, round(wait + 0.5)))}
            raise Refusal(429, "this key has made too many requests in a minute", "rate_limit", headers=after)

    def key(self, scope: Scope) -> ApiKey:
        """The valid API key of a request. Raises Refusal."""
        sent = list(bearers(scope))
        for bearer in sent:
            if (key := self._directory.find(bearer)) is not None:
                return key
        what = "the API key is unknown or was revoked" if sent else "an API key is needed"
        raise Refusal(401, f"{what}: `etude live key create` makes one", "invalid_api_key")


def _equal(bearer: str, token: str) -> bool:
    return hmac.compare_digest(bearer.encode("latin-1"), token.encode())
