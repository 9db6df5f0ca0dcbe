"""vLLM 0.32 as the server of a run: token ids in and out, experts, weight versions, live updates.

    POST /inference/v1/generate            --enable-scale-out; --logprobs-mode processed_logprobs: log-probabilities of
                                           the distribution that is sampled from; --enable-return-routed-experts
    POST /collective_rpc, /pause, /resume  VLLM_SERVER_DEV_MODE=1; the worker has `etude.inference.vllm.worker`
    GET  /server_info, /weight_info, /metrics

An update is stage, pause, swap, commit, resume. Each worker writes the slices that it holds; all commit if the digests
of their shares add up to the manifest's, else all undo. The scheduler keeps its requests, with their keys and values
(`mode=keep`), and the weight version is set while nothing runs: the response names, span by span, the version that
sampled each token.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

import httpx2
import msgspec

from etude.errors import UserError
from etude.protocol.access import TOKEN_VARIABLE
from etude.protocol.backends.client import SESSIONS, EngineError, EngineLost, OnPart, check_answer
from etude.protocol.backends.vllm_answers import (
    GENERATE,
    StreamedAnswer,
    body_of,
    events_of,
    params_of,
    spans_to_versions,
)
from etude.protocol.wire import GenerateRequest, SequenceScores
from etude.records import Generation, joined

T = TypeVar("T")
OLDEST_VLLM = (0, 32)
STAGE_SECONDS = 3600.0  # to fetch and verify a version, beside the requests
DECODED = 32  # tokens decoded in place of a scored sequence's last ones; etude's engine decodes as many
_POLL = 0.1
_RPC_SECONDS = 900.0  # one call of a worker; the first reads the checkpoint again
_INFO_SECONDS = 5.0
_FORGET_SECONDS = 30.0
_METRICS_SECONDS = 1.0  # between two readings of a server's metrics
_METRIC = re.compile(
    r"^vllm:(num_requests_running|num_requests_waiting|generation_tokens_total)(?:\{[^}]*\})? ([0-9.e+-]+)$", re.M
)
_FIGURES = {
    "num_requests_running": "running",
    "num_requests_waiting": "waiting",
    "generation_tokens_total": "generated_tokens",
}


class NotLive(EngineError):
    """A version did not go live; the old version is served unchanged."""


@dataclass(frozen=True)
class WeightsOf:
    """The weight store as servers reach it: its URL, the URL of a relay or "", the path of a public key or ""."""

    store: str
    relay: str = ""
    public_key: str = ""


@dataclass(frozen=True)
class LiveVersion:
    """A version that went live."""

    version: int
    digest: str  # of the live tensors
    pause: float  # seconds without a step


@dataclass
class _VllmState:
    """The state of one server."""

    live: LiveVersion = LiveVersion(-1, "", 0.0)
    followed: bool = False
    swaps: int = 0  # begun and ended ones: odd during a swap
    fed: float = -1.0  # when the server last named the live version, on the monotonic clock
    asking: asyncio.Lock = field(default_factory=asyncio.Lock)
    configuration: dict[str, Any] = field(default_factory=dict[str, Any])
    figures: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_FIGURES.values(), 0.0))
    read: float = -_METRICS_SECONDS  # time of the figures, on the monotonic clock


class KeptKeys:
    """Salts of a server's prefix cache: a request reuses keys and values only of sessions that began under the same
    version as its own. A new session never sees older keys, and an old session keeps its own."""

    def __init__(self, name: str) -> None:
        self._name = name  # of the run, so that runs that follow each other at one server share nothing
        self._began: dict[str, int] = {}

    def began(self, session: str | None, version: int) -> int:
        """The version under which a session began; `version` for a new one, and for a request without one."""
        if session is None:
            return version
        began = self._began.setdefault(session, version)
        while len(self._began) > SESSIONS:
            del self._began[next(iter(self._began))]
        return began

    def salt(self, began: int) -> str:
        """The salt of a session that began under this version."""
        return f"{self._name}-{began}"


class BusyTime:
    """The seconds during which each server has had at least one request of this client."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        self._live: dict[str, int] = {}
        self._total: dict[str, float] = {}

    @contextmanager
    def at(self, url: str) -> Iterator[None]:
        """The time of one request at the server."""
        now = time.monotonic()
        self._live[url] = self._live.get(url, 0) + 1
        self._since.setdefault(url, now)
        try:
            yield
        finally:
            self._live[url] -= 1
            if not self._live[url]:
                self._total[url] = self._total.get(url, 0.0) + time.monotonic() - self._since.pop(url)

    def seconds(self, url: str) -> float:
        """The busy seconds of a server so far."""
        running = time.monotonic() - self._since[url] if url in self._since else 0.0
        return self._total.get(url, 0.0) + running


class VllmBackend:
    """vLLM servers that a run updates. `expert_layers` are the indices of the layers with experts, because vLLM returns
    an array of all layers; None without router replay. `context` is the most tokens of a prompt and its answer."""

    follows = False

    def __init__(
        self, name: str, weights: WeightsOf, *, context: int, expert_layers: Sequence[int] | None = None
    ) -> None:
        self._weights, self._context = weights, context
        self._layers = None if expert_layers is None else list(expert_layers)
        self._kept, self._busy = KeptKeys(name), BusyTime()
        self._servers: dict[str, _VllmState] = {}

    def _at(self, url: str) -> _VllmState:
        return self._servers.setdefault(url, _VllmState())

    # Requests ---------------------------------------------------------------------------------------------------------

    async def generate(self, http: httpx2.AsyncClient, url: str, request: GenerateRequest, on_part: OnPart) -> None:
        """One answer under the run's weights. Raises EngineLost for a server that was started anew."""

        def take(part: Generation) -> None:
            if min(part.versions, default=0) < 0:
                self._servers[url] = _VllmState(configuration=self._at(url).configuration)
                raise EngineLost(f"{url} has been started anew, without the weights of the run")
            on_part(part)

        await self._generate(http, url, request, take)

    async def _generate(self, http: httpx2.AsyncClient, url: str, request: GenerateRequest, on_part: OnPart) -> None:
        """`kv_version` is the version under which the session began: no key is older. A token leaves before the last
        event if its version is certain: no swap has begun since before the request, and the server that answers has
        named this version since. Tokens that come later wait for the last event, and a lost server costs them, too; so
        do all tokens in a process that does not update the server, because it sees no swap."""
        if request.documents:
            raise EngineError("vLLM computes no documents: use etude's engine")
        at = self._at(url)
        version, swaps, certain, fed = at.live.version, at.swaps, 0, False
        began = self._kept.began(request.session, version)
        answer = StreamedAnswer(url, request, self._layers, began)
        every = float("inf") if request.part_seconds is None else request.part_seconds
        first, left = 0.0, time.monotonic()  # times of the first event and of the last part
        with self._busy.at(url):
            body = body_of(request) | {"cache_salt": self._kept.salt(began)}
            async with http.stream("POST", f"{url}{GENERATE}", json=body) as response:
                if response.status_code != 200:
                    await response.aread()
                    check_answer(url, response)
                try:
                    async for event in events_of(url, response):
                        answer.add(event)
                        first = first or time.monotonic()
                        if at.followed and at.swaps == swaps and swaps % 2 == 0 and version >= 0:
                            certain = len(answer.ids)
                        if answer.ended or certain == answer.sent or time.monotonic() - left < every:
                            continue
                        left, fed = time.monotonic(), fed or await self._is_fed(http, url, at, first)
                        if fed:
                            on_part(answer.part(certain, version))
                except httpx2.TransportError:
                    if not answer.ended:
                        raise
        on_part(answer.last())

    async def _is_fed(self, http: httpx2.AsyncClient, url: str, at: _VllmState, since: float) -> bool:
        """Whether the server has named the live version at some moment after `since`: one that was started anew has the
        weights of its checkpoint. Asked once for all requests that had begun."""
        async with at.asking:
            if at.fed < since:
                now, swaps = time.monotonic(), at.swaps
                try:
                    response = await http.get(f"{url}/weight_info", timeout=_INFO_SECONDS)
                    name = response.json()["weight_version"] if response.status_code == 200 else ""
                except httpx2.HTTPError:
                    name = ""
                if name == str(at.live.version) and at.swaps == swaps and not swaps % 2 and self._at(url) is at:
                    at.fed = now
        return at.fed >= since

    async def _whole(self, http: httpx2.AsyncClient, url: str, request: GenerateRequest) -> Generation:
        parts: list[Generation] = []
        await self._generate(http, url, request, parts.append)
        return joined(parts)

    async def score(
        self, http: httpx2.AsyncClient, url: str, sequences: Sequence[list[int]], decoded: bool
    ) -> SequenceScores | None:
        """Log-probabilities of prompts, which vLLM computes without its prefix cache. vLLM cannot decode chosen tokens.
        With `decoded`, each sequence is cut short and vLLM decodes as many tokens of its own; the difference of their
        log-probabilities, decoded minus as a prompt, is added to those of the sequence's end."""
        before = self._at(url).live
        answers = await asyncio.gather(*(self._scored(http, url, ids, decoded) for ids in sequences))
        if self._at(url).live != before or any(versions != {before.version} for _, versions in answers):
            return None
        return SequenceScores(version=before.version, digest=before.digest, logprobs=tuple(s for s, _ in answers))

    async def _scored(
        self, http: httpx2.AsyncClient, url: str, ids: list[int], decoded: bool
    ) -> tuple[list[float], set[int]]:
        """The scores of one sequence, and the versions that made them."""
        logprobs, version = await self._score(http, url, ids)
        count = min(DECODED, len(ids) // 2)
        if not decoded or not count:
            return logprobs, {version}
        own = await self._whole(http, url, GenerateRequest(ids=ids[:-count], max_tokens=count))
        passed, other = await self._score(http, url, [*ids[:-count], *own.ids])
        first = len(logprobs) - count
        ends = zip(logprobs[first:], own.logprobs, passed[first:], strict=True)
        return [*logprobs[:first], *(logprob + step - same for logprob, step, same in ends)], {
            version,
            other,
            *own.versions,
        }

    async def _score(self, http: httpx2.AsyncClient, url: str, ids: list[int]) -> tuple[list[float], int]:
        body = {"token_ids": ids, "sampling_params": params_of(max_tokens=1, temperature=0.0, prompt_logprobs=0)}
        with self._busy.at(url):
            response = await http.post(f"{url}{GENERATE}", json=body)
        check_answer(url, response)
        answer = response.json()
        entries = cast(list[dict[str, Any]], answer["prompt_logprobs"][1:])
        logprobs = [float(by_id[str(i)]["logprob"]) for i, by_id in zip(ids[1:], entries, strict=True)]
        return logprobs, spans_to_versions(answer["choices"][0].get("weight_versions"), 1, url)[0]

    # The server -------------------------------------------------------------------------------------------------------

    async def health(self, http: httpx2.AsyncClient, url: str, timeout: float) -> dict[str, Any]:
        """The version and digest of the last swap, which reads back all live tensors; the load by vLLM's metrics."""
        at = self._at(url)
        response = await http.get(f"{url}/health", timeout=timeout)
        if response.status_code != 200:
            raise EngineLost(f"{url}: vLLM's engine is dead ({response.status_code})")
        if time.monotonic() - at.read >= _METRICS_SECONDS:
            metrics = (await http.get(f"{url}/metrics", timeout=timeout)).text
            sums = dict.fromkeys(_FIGURES.values(), 0.0)
            for name, value in _METRIC.findall(metrics):
                sums[_FIGURES[name]] += float(value)
            at.figures, at.read = sums, time.monotonic()
        return {
            "status": "ok",
            "error": "",
            "version": at.live.version,
            "digest": at.live.digest,
            "last_pause_ms": at.live.pause * 1e3,
            **at.figures,
            "busy_seconds": self._busy.seconds(url),
            "configuration": at.configuration,
            "documents": {"refusal": "vLLM computes no documents: use etude's engine"},
        }

    async def check(self, http: httpx2.AsyncClient, url: str) -> None:
        """Reads the server's configuration and tries one request. Raises UserError for a setting or capability that the
        run needs and the server lacks."""
        version = (await http.get(f"{url}/version")).json().get("version", "")
        if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST_VLLM:
            raise UserError(
                f"{url} runs vLLM {version or 'of an unknown version'}: etude needs {OLDEST_VLLM[0]}.{OLDEST_VLLM[1]}"
            )
        info = await http.get(f"{url}/server_info", params={"config_format": "json"})
        if info.status_code != 200:
            raise UserError(f"{url} is not in development mode: start vLLM with VLLM_SERVER_DEV_MODE=1")
        config = cast(dict[str, dict[str, Any]], info.json()["vllm_config"])
        if wrong := self._wrong(config):
            raise UserError(f"{url} {wrong}")
        self._at(url).configuration = {
            "engine": f"vLLM {version}",
            "head": str(config["model_config"]["dtype"]).removeprefix("torch."),
            "log_softmax": "float32",
            "max_length": config["model_config"]["max_model_len"],
        }
        trial = GenerateRequest(ids=[0, 1], max_tokens=2, routes_from=None if self._layers is None else 0)
        try:
            await self._whole(http, url, trial)
        except EngineError as e:
            raise UserError(f"{url} cannot play episodes: {e}") from None

    def _wrong(self, config: Mapping[str, Mapping[str, Any]]) -> str:
        model, parallel = config["model_config"], config["parallel_config"]
        needed = self._context
        return next(
            (
                sentence
                for wrong, sentence in (
                    (
                        model["logprobs_mode"] != "processed_logprobs",
                        "returns log-probabilities of another distribution than it samples from: start vLLM with "
                        "--logprobs-mode processed_logprobs",
                    ),
                    (
                        model["max_model_len"] < needed,
                        f"takes {model['max_model_len']} tokens, rollout.context is {needed}: start vLLM with "
                        f"--max-model-len {needed}",
                    ),
                    (
                        "etude.inference.vllm.worker" not in (parallel.get("worker_extension_cls") or ""),
                        "cannot be updated: start vLLM with --worker-extension-cls "
                        "etude.inference.vllm.worker.WorkerExtension",
                    ),
                    (refused_parallelism(parallel), refused_parallelism(parallel)),
                    (model.get("quantization"), "serves quantised weights, which are not the published ones"),
                    (
                        config.get("speculative_config"),
                        "speculates, which is not tried in a run: start vLLM without --speculative-config",
                    ),
                )
                if wrong
            ),
            "",
        )

    async def bring(self, http: httpx2.AsyncClient, url: str, version: int) -> None:
        """Updates the server, whose requests continue with their keys and values. Raises NotLive."""
        server, at = VllmServer(http, url), self._at(url)

        def swapping() -> None:
            at.swaps += 1

        try:
            if not at.followed:
                swapping()
                reached, digest = await server.follow(self._weights, keep=True)
                at.live, at.followed = LiveVersion(reached, digest, 0.0), True
                at.swaps += 1
            if at.live.version < version:
                at.live = await server.update(version, keep=True, swapping=swapping)
        finally:
            at.swaps += at.swaps % 2

    def note(self, url: str, version: int) -> None:
        """Keeps the version, under which new sessions begin. Tokens of this version are believed at the last event."""
        at = self._at(url)
        if at.live.version != version:
            at.live = LiveVersion(version, "", 0.0)


_PARALLEL = {  # kinds that are not fed, and the value that stands for none
    "pipeline_parallel_size": ("pipeline", 1),
    "data_parallel_size": ("data", 1),
    "prefill_context_parallel_size": ("context", 1),
    "decode_context_parallel_size": ("context", 1),
    "enable_expert_parallel": ("expert", 0),
}


def refused_parallelism(parallel: Mapping[str, Any]) -> str:
    """Why the workers of a server with this parallel configuration of vLLM cannot be updated, or ""."""
    kind = next((kind for name, (kind, none) in _PARALLEL.items() if parallel.get(name, none) > none), "")
    return kind and f"has {kind} parallelism, which etude does not feed: start vLLM with tensor parallelism alone"


class VllmServer:
    """A vLLM server in development mode, whose workers have the `etude.inference.vllm.worker.WorkerExtension`."""

    def __init__(self, http: httpx2.AsyncClient, url: str, seconds: float = _RPC_SECONDS) -> None:
        self.url = url.rstrip("/")
        self._http, self._seconds = http, seconds

    async def ask(self, method: str, *arguments: str) -> list[dict[str, Any]]:
        """The results of a method of the server's workers. Raises NotLive if one refuses, EngineLost if the server
        cannot be reached, and UserError for a server without development mode."""
        body = {"method": method, "args": list(arguments)}
        answers = cast(list[dict[str, Any]], (await self.send("POST", "/collective_rpc", body=body)).get("results"))
        if not answers:
            raise UserError(f"{self.url} is no vLLM server: its /collective_rpc names no results")
        for answer in answers:
            if answer.get("error"):
                raise NotLive(str(answer["error"]))
        return answers

    async def send(self, verb: str, path: str, body: dict[str, Any] | None = None, **query: str) -> dict[str, Any]:
        """One request. Raises EngineLost without an answer of status 200, UserError for a missing route, for a wrong
        token, and for an answer that is no JSON object."""
        try:
            response = await self._http.request(
                verb, f"{self.url}{path}", params=query, json=body, timeout=self._seconds
            )
        except httpx2.HTTPError as e:
            raise EngineLost(f"{self.url} does not answer ({type(e).__name__} {e})") from None
        if response.status_code == 404:
            raise UserError(f"{self.url} has no {path}: start vLLM with VLLM_SERVER_DEV_MODE=1")
        if response.status_code in (401, 403):
            raise UserError(f"{self.url} needs another token: set {TOKEN_VARIABLE} to the server's")
        if response.status_code != 200:
            raise EngineLost(
                f"{self.url}{path} answered {response.status_code} ({response.text[:200]}): look at its log"
            )
        try:
            return msgspec.json.decode(response.content, type=dict[str, Any])
        except ValueError:
            raise UserError(f"{self.url} is no vLLM server: its {path} answers no JSON object") from None

    async def follow(self, weights: WeightsOf, *, keep: bool) -> tuple[int, str]:
        """Opens the store at the server; returns the served version, -1 if it is none of the store's, and its digest. A
        swap whose caller was killed is finished if the server's weights are whole."""
        try:
            opened = await self.ask("etude_open", weights.store, weights.relay, weights.public_key)
            return await _to_its_end(self._as_before(int(opened[0]["version"]), keep))
        except NotLive as e:
            raise UserError(f"{self.url} cannot follow {weights.store}: {e}") from None

    async def _as_before(self, version: int, keep: bool) -> tuple[int, str]:
        """Settles the last swap, and lets a server go on that it has left paused."""
        paused = (await self.send("GET", "/is_paused"))["is_paused"]
        version, digest = await self._settled() if version >= 0 or paused else (version, "")
        if paused:
            await self._resume(version, keep)
        return version, digest

    async def _settled(self) -> tuple[int, str]:
        """Version and digest of a server whose last swap is committed, if it is whole, else undone. Raises NotLive."""
        try:
            version, digest = _whole(await self.ask("etude_digest"))
        except NotLive:
            await self.ask("etude_undo")
            try:
                version, digest = _whole(await self.ask("etude_digest"))
            except NotLive as e:
                raise NotLive(f"{e}; start this server again") from None
        await self.ask("etude_commit")
        return version, digest

    async def update(
        self,
        version: int,
        *,
        keep: bool,
        seconds: float = STAGE_SECONDS,
        swapping: Callable[[], None] = lambda: None,
    ) -> LiveVersion:
        """Makes a version live. With `keep`, requests continue with their keys and values, and the prefix cache stays;
        else all are computed again. `swapping` is called before the server pauses. Raises NotLive if the old version
        stays."""
        end = time.monotonic() + seconds
        await self.ask("etude_stage", str(version))
        status = await self.ask("etude_status")
        while any(worker["staging"] for worker in status):
            if time.monotonic() > end:
                raise NotLive(f"version {version} was not fetched within {seconds:g} s")
            await asyncio.sleep(_POLL)
            status = await self.ask("etude_status")
        staged = min(int(worker["staged"]) for worker in status)
        if staged < 0:
            raise NotLive(f"the server does not find version {version} in the store")
        swapping()
        return await _to_its_end(self._swap(staged, keep))

    async def _swap(self, staged: int, keep: bool) -> LiveVersion:
        began = time.monotonic()
        await self.send("POST", "/pause", mode="keep")
        try:
            _, digest = _whole(await self.ask("etude_swap", str(staged)))
        except NotLive:
            await self.ask("etude_undo")
            await self.send("POST", "/resume")
            raise
        await self.ask("etude_commit")
        await self._resume(staged, keep)
        return LiveVersion(staged, digest, time.monotonic() - began)

    async def _resume(self, version: int, keep: bool) -> None:
        if not keep:
            await self._forget_keys()
        await self.send("POST", "/update_weight_version", body={"new_version": str(version)})
        await self.send("POST", "/resume")

    async def _forget_keys(self) -> None:
        """Has all keys and values computed again. Raises EngineLost for a server that holds some: it stays paused."""
        end = time.monotonic() + _FORGET_SECONDS
        reset = partial(self.send, "POST", "/reset_prefix_cache", reset_running_requests="true")
        while not (await reset()).get("success"):
            if time.monotonic() > end:
                raise EngineLost(f"{self.url} holds keys and values of the weights before, and stays paused")
            await asyncio.sleep(_POLL)


async def _to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which a caller that is cancelled waits for: it has paused a server, and alone resumes it.
    Its requests have deadlines."""
    task, cancelled = asyncio.ensure_future(work), False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        _ = task.cancelled() or task.exception()  # read, so that asyncio does not complain
        raise asyncio.CancelledError
    return task.result()


def _whole(answers: Sequence[Mapping[str, Any]]) -> tuple[int, str]:
    """The version that all workers hold, and the sum of their digests, which is its digest. Raises NotLive for another
    sum, and for several versions."""
    versions, published = {int(answer["version"]) for answer in answers}, {str(answer["digest"]) for answer in answers}
    if len(versions) != 1 or len(published) != 1:
        raise NotLive(f"its workers hold versions {', '.join(map(str, sorted(versions)))}")
    version, digest = versions.pop(), f"{sum(int(str(answer['share']), 16) for answer in answers) % 2**64:016x}"
    if {digest} != published:
        raise NotLive(f"the digest of the live tensors is {digest}, that of version {version} is {published.pop()}")
    return version, digest
