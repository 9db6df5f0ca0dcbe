"""Keeps the exact tokens of a vLLM server's turns for a gateway, as `etude serve` does:

    vllm serve MODEL --middleware etude.inference.vllm.kept_turns.TurnKeeper --logprobs-mode processed_logprobs
                     --worker-extension-cls etude.inference.vllm.worker.WorkerExtension

POST /v1/chat/completions, /v1/responses, /v1/messages      with `X-Etude-Turn: ULID`
GET  /v1/turns/ULID                                         a `ServedTokens` as MessagePack, once
GET  /health                                                version and digest of the weights, as JSON

All three APIs sample by one method of vLLM's engine, where a turn's prompt, tokens, log-probabilities and versions are
read as they pass. Clients get the bytes that vLLM sends without this class. Message and malformed calls are read from
the tokens by etude's dialect. With a token in $ETUDE_API_KEY all routes but health need it (`guard.py`); vLLM's own
key does not cover the turns, so it is refused without that token.
"""

# pyright: basic

from __future__ import annotations

import asyncio
import inspect
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from starlette.responses import JSONResponse, Response

from etude.errors import UserError
from etude.inference.turn_store import WAIT_SECONDS, TurnStore
from etude.inference.vllm.guard import HEALTH, TokenGuard
from etude.protocol import MSGPACK, TOKEN_VARIABLE, TURN_HEADER, ServedTokens, error, headers, own_token
from etude.protocol.apis import SampledTurn, tools_of
from etude.records import Generation
from etude.renderers import Renderer, renderer_for

_PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
_TURNS = "/v1/turns/"
_CHANGES = ("/pause", "/update_weight_version", "/resume")  # the routes of an update, in their order
_RPC_SECONDS = 5.0
# Sampling parameters that do not change the distribution of a token, beside temperature and top-p.
_HARMLESS = frozenset(
    [
        "n",
        "temperature",
        "top_p",
        "top_k",
        "seed",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "max_tokens",
        "logprobs",
        "prompt_logprobs",
        "flat_logprobs",
        "detokenize",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "include_stop_str_in_output",
        "output_kind",
        "stream_interval",
        "skip_clone",
        "output_text_buffer_length",
        "skip_reading_prefix_cache",
        "routed_experts_prompt_start",
        "repetition_detection",
    ]
)
_TURN: ContextVar[_WatchedTurn | None] = ContextVar("turn", default=None)


@dataclass
class _WatchedTurn:
    """One answer, as it is sampled."""

    name: str
    body: bytes
    changes: int  # of the weights before its request
    samples: int = 0  # calls of the engine, and choices
    parameters: Any = None  # vLLM's SamplingParams
    adapter: bool = False
    prompt: list[int] = field(default_factory=list[int])
    ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    spans: Any = None  # vLLM's, from the last output
    finish: str = "abort"  # of an answer whose client left
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def watched(self, outputs: AsyncIterator[Any], is_first: bool) -> AsyncIterator[Any]:
        """The engine's outputs, which are read as they pass."""
        async with aclosing(outputs) as passing:  # pyright: ignore[reportArgumentType]
            async for output in passing:
                if is_first:
                    self._take(output)
                yield output

    def _take(self, output: Any) -> None:
        if output.prompt_token_ids is not None:
            self.prompt = list(output.prompt_token_ids)
        for part in output.outputs:
            if part.index != 0:
                continue
            ids = list(part.token_ids)
            logprobs = [float(of[i].logprob) for i, of in zip(ids, part.logprobs or (), strict=False)]
            if self.parameters.output_kind.name == "DELTA":
                ids, logprobs = self.ids + ids, self.logprobs + logprobs
            self.ids, self.logprobs = ids, logprobs
            if part.finish_reason is not None:
                self.finish, self.spans = part.finish_reason, part.weight_versions


class TurnKeeper:
    """An ASGI application around vLLM's. A server that cannot keep turns does not start, and says why."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app
        self._entrance = self._serve if own_token() is None else TokenGuard(self._serve)
        self._store: TurnStore[_WatchedTurn] = TurnStore(lambda turn: turn.ended.is_set())
        self._renderer: Renderer | None = None
        self._engine: Any = None
        self._live: dict[str, Any] | None = None  # version and digest; None after a change
        self._changes = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            try:
                await self._begin(scope["app"].state)
            except UserError as e:
                await receive()
                return await send({"type": "lifespan.startup.failed", "message": str(e)})
        await self._entrance(scope, receive, send)

    async def _begin(self, state: Any) -> None:
        """Reads the model's dialect, and wraps the engine's method. Raises UserError."""
        engine = state.engine_client
        refuse(engine.vllm_config)
        if own_token() is None and (
            os.environ.get("VLLM_API_KEY") or getattr(getattr(state, "args", None), "api_key", None)
        ):
            raise UserError(f"vLLM's own key does not cover the turns: set {TOKEN_VARIABLE} to the same key")
        self._engine, generate = engine, engine.generate
        try:
            await self._state()
        except Exception as e:
            worker = "--worker-extension-cls etude.inference.vllm.worker.WorkerExtension"
            raise UserError(f"its workers follow no store ({e}): start vLLM with {worker}") from None
        self._renderer = await asyncio.to_thread(lambda: renderer_for(_folder(engine.vllm_config), tools=False))
        signature = inspect.signature(generate)

        def keeping(*positional: Any, **named: Any) -> AsyncIterator[Any]:
            turn = _TURN.get()
            if turn is None:
                return generate(*positional, **named)
            call = signature.bind(*positional, **named)
            parameters = call.arguments["sampling_params"].clone()
            if parameters.logprobs is None:
                parameters.logprobs = 0
            call.arguments["sampling_params"] = parameters
            is_first = not turn.samples
            turn.samples += parameters.n
            if is_first:
                turn.parameters, turn.adapter = parameters, call.arguments.get("lora_request") is not None
            return turn.watched(generate(*call.args, **call.kwargs), is_first)

        engine.generate = keeping

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        path, method = scope["path"], scope["method"]
        if path == HEALTH and method == "GET":
            await self._health(scope, receive, send)
        elif path.startswith(_TURNS) and method == "GET":
            await (await self._taken(path.removeprefix(_TURNS)))(scope, receive, send)
        elif path in _CHANGES and method == "POST":
            self._changes += 1
            try:
                await self._app(scope, receive, send)
            finally:
                self._live = None if path == _CHANGES[-1] else self._live
        elif path in _PATHS and method == "POST" and (name := next(headers(scope, TURN_HEADER.encode()), "")):
            await self._keep(name, scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _keep(self, name: str, scope: Any, receive: Any, send: Any) -> None:
        """Passes a request on, and keeps its turn, if its name can be kept. vLLM makes the answer's id of the header
        `X-Request-Id`."""
        messages, body = [await receive()], bytearray()
        while messages[-1].get("more_body"):
            messages.append(await receive())
        for message in messages:
            body += message.get("body", b"")
        turn = _WatchedTurn(name, bytes(body), self._changes)
        left = iter(messages)

        async def again() -> Any:
            return next(left, None) or await receive()

        if not self._store.keep(name, turn, len(body) // 4):
            return await self._app(scope, again, send)
        own = [(b"x-request-id", name.encode())]
        scope = dict(scope) | {"headers": [*(h for h in scope["headers"] if h[0] != b"x-request-id"), *own]}
        mark = _TURN.set(turn)
        try:
            await self._app(scope, again, send)
        finally:
            turn.ended.set()
            _TURN.reset(mark)

    async def _taken(self, name: str) -> Response:
        """The answer to a gateway that fetches a turn."""
        if (turn := self._store.take(name)) is None:
            return error(404, "this server keeps no such turn", code="not_found")
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await turn.ended.wait()
        except TimeoutError:
            return error(409, "the turn has not ended", code="not_ended")
        versions = await self._versions(turn)
        if versions is None or turn.adapter:
            return error(410, "the turn's tokens are of unknown weights", code="failed")
        answer = await asyncio.to_thread(self._served_tokens, turn, versions)
        return Response(msgspec.msgpack.encode(answer), media_type=MSGPACK)

    async def _versions(self, turn: _WatchedTurn) -> list[int] | None:
        """The version of each token; None if it is not known. vLLM names versions in its last output alone: a turn that
        was ended before has the server's version if there was no update since its request."""
        if turn.spans is not None:
            names = [span.version for span in turn.spans for _ in range(span.start, span.end)]
            return [int(n) if n.isdigit() else -1 for n in names] if len(names) == len(turn.ids) else None
        if self._changes != turn.changes or not turn.ids:
            return None
        with suppress(Exception):
            return [(await self._state())["version"]] * len(turn.ids)
        return None

    def _served_tokens(self, turn: _WatchedTurn, versions: list[int]) -> ServedTokens:
        assert self._renderer is not None
        parameters, renderer = turn.parameters, self._renderer
        stops = [parameters.stop] if isinstance(parameters.stop, str) else parameters.stop or ()
        tools = tools_of(json.loads(turn.body), strict=False)
        sampled = SampledTurn(renderer, len(turn.prompt), tuple(stops), tools)
        sampled.name = turn.name
        finish = turn.finish if turn.finish in ("stop", "length") else "abort"
        sampled.settle(Generation(ids=turn.ids, logprobs=turn.logprobs, versions=versions, finish_reason=finish))
        starts = [n for n, version in enumerate(versions) if n == 0 or version != versions[n - 1]]
        ends = zip(starts, [*starts[1:], len(versions)], strict=False)
        return ServedTokens(
            prompt_ids=np.array(turn.prompt, "<i4").tobytes(),
            ids=np.array(turn.ids, "<i4").tobytes(),
            logprobs=np.array(turn.logprobs, "<f4").tobytes(),
            spans=[(low, high, versions[low]) for low, high in ends],
            temperature=parameters.temperature,
            top_p=parameters.top_p,
            finish_reason=finish,
            plain=is_plain(parameters),
            choices=turn.samples,
            message=msgspec.json.encode(sampled.message),
            text=renderer.text(turn.prompt) + renderer.text(turn.ids),
            malformed=sampled.malformed,
        )

    async def _health(self, scope: Any, receive: Any, send: Any) -> None:
        """vLLM's answer, with a body if the server is well. During an update, the version before; 503 before the first,
        for the checkpoint is no release, and if the workers do not answer."""
        head: dict[str, Any] = {}

        async def held(message: Any) -> None:
            head.update(message)

        await self._app(scope, receive, held)
        if head.get("status") != 200:
            return await Response(status_code=head.get("status", 503))(scope, receive, send)
        try:
            live = await self._state()
        except Exception as e:
            return await error(503, f"the workers do not answer: {type(e).__name__} {e}".strip())(scope, receive, send)
        why = "" if live["version"] >= 0 else "it serves its checkpoint: feed it a version with `etude weights feed`"
        body = {"status": "waiting" if why else "ok", "error": why, "keeps_turns": True, **live}
        await JSONResponse(body, 503 if why else 200)(scope, receive, send)

    async def _state(self) -> dict[str, Any]:
        """Version and digest of the weights in the workers' memory; -1 and "" before a version is live."""
        if self._live is None:
            before = self._changes
            async with asyncio.timeout(_RPC_SECONDS):
                workers = await self._engine.collective_rpc("etude_status", timeout=_RPC_SECONDS)
            live = {name: workers[0][name] for name in ("version", "digest")}
            if before != self._changes:
                return live
            self._live = live
        return self._live


def refuse(config: Any) -> None:
    """Raises UserError for a configuration of vLLM with which turns cannot be kept."""
    model = config.model_config
    reasons = {
        "returns log-probabilities of another distribution than it samples from: start vLLM with --logprobs-mode "
        "processed_logprobs": model.logprobs_mode != "processed_logprobs",
        "has several API servers, of which each keeps turns of its own: start vLLM with --api-server-count 1": getattr(
            config.parallel_config, "_api_process_count", 1
        )
        > 1,
        "speculates, which is not tried with turns that are learned from: start vLLM without "
        "--speculative-config": bool(config.speculative_config),
        "serves quantised weights, which are not the published ones": bool(model.quantization),
    }
    if wrong := [reason for reason, holds in reasons.items() if holds]:
        raise UserError(f"this server cannot keep turns: it {wrong[0]}")


def is_plain(parameters: Any) -> bool:
    """Whether nothing but temperature and top-p changes the distribution of tokens: all other parameters of vLLM have
    their defaults, also those that are new there."""
    default = type(parameters)()
    names = [name for name in parameters.__struct_fields__ if not name.startswith("_") and name not in _HARMLESS]
    same = all((getattr(parameters, name) or None) == (getattr(default, name) or None) for name in names)
    return same and parameters.top_k <= 0  # 0 and -1 mean all tokens


def _folder(config: Any) -> Path:
    """The folder with the tokenizer of a server's model, which vLLM has loaded from a folder or a hub's cache."""
    model = config.model_config
    name, revision = (model.tokenizer or model.model), (model.tokenizer_revision or model.revision)
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, revision=revision, local_files_only=True))
