"""The answer to one request in the making: its parts, which may come from several servers, and the request for its end.

A server that is lost, or hands a turn back, costs the tokens after its last part: the next server gets the prompt and
all tokens that came. Draws depend on the seed and the position alone, so under equal weights the turn is the
undisturbed one.
"""

from __future__ import annotations

import msgspec

from etude.protocol.wire import GenerateRequest
from etude.records import Generation, joined


class GrowingTurn:
    """The answer to `request`, of which `begun` has been sampled already. `parts` are those so far."""

    def __init__(self, request: GenerateRequest, begun: Generation | None = None) -> None:
        self._request = request
        self._prompt = len(request.ids) + sum(map(len, request.documents))
        self._fetching = False  # a server computes the experts of the last tokens, and its sample is dropped
        self.parts: list[Generation] = []
        self.ids: list[int] = []  # sampled so far
        self._routed = request.routes_from  # the first position whose experts are unknown
        self._reason = ""
        if begun is not None:
            self.add(begun)

    def rest(self) -> GenerateRequest | None:
        """The request for what is missing, None if nothing is: the sampled tokens are part of its prompt."""
        request, count = self._request, len(self.ids)
        self._fetching = False
        if self._reason:
            return None
        if not self._complete():
            ids, most = [*request.ids, *self.ids], request.max_tokens - count
            return msgspec.structs.replace(request, ids=ids, max_tokens=most, routes_from=self._routed)
        if not self._unrouted():
            return None
        self._fetching = True
        ids = [*request.ids, *self.ids[:-1]]
        return msgspec.structs.replace(request, ids=ids, max_tokens=1, routes_from=self._routed)

    def add(self, part: Generation) -> Generation:
        """Adds the next part, and returns it as it counts. Raises ValueError for one that does not follow."""
        if not len(part.ids) == len(part.logprobs) == len(part.versions):
            raise ValueError("a part's ids, log-probabilities and versions differ in number")
        if self._fetching:
            last = self.parts[-1]
            part = msgspec.structs.replace(
                last,
                ids=[],
                logprobs=[],
                versions=[],
                finish_reason=self._complete() if part.finish_reason else "",
                routes=part.routes,
                accepted_draft_tokens=0,
                rejected_draft_tokens=0,
            )
        if part.routes is not None:
            end = self._prompt + len(self.ids) + len(part.ids) - 1
            if part.routes.first != self._routed or part.routes.end > end:
                raise ValueError(
                    f"experts of positions {part.routes.first} to {part.routes.end} came, not {self._routed} to {end}"
                )
            self._routed = part.routes.end
        if part.ids or part.routes or part.finish_reason:
            self.parts.append(part)
        self.ids += part.ids
        self._reason = part.finish_reason
        return part

    def generation(self) -> Generation:
        """The whole answer. Raises ValueError for parts that do not fit together."""
        whole = joined(self.parts)
        return whole if whole.finish_reason else msgspec.structs.replace(whole, finish_reason=self._complete())

    def _complete(self) -> str:
        """The reason why nothing more is sampled after these tokens, "" if there is none."""
        if self.ids and self.ids[-1] in self._request.stop:
            return "stop"
        return "length" if len(self.ids) >= self._request.max_tokens else ""

    def _unrouted(self) -> bool:
        """Whether experts of a fed position are wanted and unknown."""
        return self._routed is not None and self._routed < self._prompt + len(self.ids) - 1
