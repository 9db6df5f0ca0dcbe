"""Requests to vLLM's `GENERATE` route, and its streamed answers.

Only the last event of a stream names the weight versions and the experts. Tokens before it leave in parts if the caller
knows their version.
"""

from __future__ import annotations

import base64
import io
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, cast

import httpx2
import msgspec
import numpy as np

from etude.protocol.backends.client import EngineError, EngineLost
from etude.protocol.wire import GenerateRequest
from etude.records import Generation, Routes

GENERATE = "/inference/v1/generate"
_EVENT_TOKENS = 8  # in one event of an answer that nobody reads as it comes; a lost server costs no more


def params_of(**own: Any) -> dict[str, Any]:
    """Sampling parameters that keep out the defaults of a model's generation_config.json."""
    return {"top_p": 1.0, "logprobs": 0, "ignore_eos": True, "detokenize": False, **own}


def body_of(request: GenerateRequest) -> dict[str, Any]:
    """The body of a streamed request. vLLM draws one sequence of random numbers for each request, from its start: the
    rest of a turn must not draw those of its beginning again, so the seed depends on the length of the prompt."""
    params = params_of(
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        seed=(request.seed + len(request.ids)) % 2**63,
        stop_token_ids=list(request.stop),
    )
    if request.routes_from is not None:
        params["routed_experts_prompt_start"] = request.routes_from
    if request.part_seconds != 0.0:
        params["stream_interval"] = _EVENT_TOKENS
    return {
        "request_id": f"etude-{uuid.uuid4().hex}",
        "token_ids": request.ids,
        "sampling_params": params,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def events_of(url: str, response: httpx2.Response) -> AsyncIterator[dict[str, Any]]:
    """The events of a stream. Raises EngineLost for an error among them."""
    async for line in response.aiter_lines():
        if line.startswith("data: {"):
            event = msgspec.json.decode(line.removeprefix("data: "), type=dict[str, Any])
            if "error" in event:
                raise EngineLost(f"{url} failed in the middle of a turn: {event['error']}")
            yield event


class StreamedAnswer:
    """The tokens of one answer that have come, of which `sent` have left in parts. `layers` are those with experts,
    None if they are not kept; `kv_version` is that of the oldest keys."""

    def __init__(self, url: str, request: GenerateRequest, layers: Sequence[int] | None, kv_version: int) -> None:
        self._url, self._request, self._layers, self._kv_version = url, request, layers, kv_version
        self._logprobs: list[float] = []
        self._last: dict[str, Any] = {}  # the fields of the last event
        self._usage: dict[str, Any] = {}
        self._version = -1  # of the tokens that were sent
        self.ids: list[int] = []
        self.sent = 0

    @property
    def ended(self) -> bool:
        """Whether the last tokens have come."""
        return bool(self._last)

    def add(self, event: Mapping[str, Any]) -> None:
        """Adds the tokens of the next event. Raises EngineError for log-probabilities of others."""
        self._usage = event.get("usage") or self._usage
        for choice in event.get("choices") or ():
            ids = choice.get("token_ids") or []
            content = cast(list[dict[str, Any]], (choice.get("logprobs") or {}).get("content") or [])
            if [entry["token_id"] for entry in content] != list(ids):
                raise EngineError(f"{self._url} sent log-probabilities of other tokens than it sampled")
            self.ids += ids
            self._logprobs += [float(entry["logprob"]) for entry in content]
            if choice.get("finish_reason") is not None:
                self._last = dict(choice)

    def part(self, count: int, version: int) -> Generation:
        """The first `count` tokens without those that were sent, of this version."""
        self._version = version
        return self._generation(count, [version] * count, "")

    def last(self) -> Generation:
        """The rest, with the experts; without a reason if vLLM has aborted the request. Raises EngineError for an
        answer that cannot be believed, EngineLost for one that has not ended."""
        url, last, count = self._url, self._last, len(self.ids)
        reason, spans = last.get("finish_reason"), last.get("weight_versions")
        if reason not in ("stop", "length", "abort", None):
            raise EngineError(f"{url} ended a turn for {reason!r}, which etude does not know")
        if reason is None or (reason == "abort" and not spans):
            raise EngineLost(f"{url} ended its answer in the middle of a turn")
        versions = spans_to_versions(spans, count, url)
        if set(versions[: self.sent]) - {self._version}:
            raise EngineError(f"{url} says that tokens are of other weights than the live ones")
        routes = None if reason == "abort" else self._routes()
        part = self._generation(count, versions, "" if reason == "abort" else reason)
        cached = (self._usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return msgspec.structs.replace(part, routes=routes, cached_tokens=cached)

    def _generation(self, count: int, versions: Sequence[int], reason: str) -> Generation:
        span = slice(self.sent, count)
        self.sent = count
        return Generation(
            ids=self.ids[span],
            logprobs=self._logprobs[span],
            versions=list(versions[span]),
            finish_reason=reason,
            kv_version=self._kv_version,
        )

    def _routes(self) -> Routes | None:
        if self._request.routes_from is None or not self.ids:
            return None
        text = self._last.get("routed_experts")
        if self._layers is None or not text:
            raise EngineError(f"{self._url} returns no experts: start it with --enable-return-routed-experts")
        try:
            array_TLK = np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
        except (ValueError, EOFError) as e:
            raise EngineError(f"{self._url} sent experts that are no array: {e}") from None
        return _routes_of(array_TLK, self._request.routes_from, self._layers)


def _routes_of(array_TLK: np.ndarray, first: int, layers: Sequence[int]) -> Routes:
    """The experts of positions from `first` on, in `layers`; `array_TLK` holds all layers of the model. Raises
    EngineError for an array with fewer."""
    if array_TLK.ndim != 3 or max(layers) >= array_TLK.shape[1]:
        raise EngineError(f"experts of shape {array_TLK.shape} are no array of this model's")
    chosen_TLK = array_TLK[:, list(layers)]
    wide = array_TLK.dtype.itemsize > 1  # by the type: it must not change within an episode
    data = np.ascontiguousarray(chosen_TLK, "<u2" if wide else "u1").tobytes()
    return Routes(first=first, ids=data, layers=len(layers), slots=array_TLK.shape[2], wide=wide)


def spans_to_versions(spans: Sequence[Mapping[str, Any]] | None, count: int, url: str) -> list[int]:
    """The weight version of each of `count` sampled tokens, from `version`, `start` and `end` of contiguous spans; -1
    for a version that is no number. Raises EngineError if the spans do not cover the tokens once, in order."""
    versions: list[int] = []
    for span in spans or ():
        name = str(span["version"])
        if span["start"] != len(versions):
            break
        versions += [int(name) if name.isdigit() else -1] * (span["end"] - span["start"])
    if len(versions) != count:
        raise EngineError(f"{url} does not say which weights sampled each of {count} tokens: {spans}")
    return versions
