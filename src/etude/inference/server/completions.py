"""OpenAI's /v1/completions: plain text, with echo, log-probabilities, suffixes, many prompts and many answers."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response, StreamingResponse

from etude.inference.engine.forward import PromptScores
from etude.inference.engine.requests import RequestFailed
from etude.inference.engine.sampling_params import TopLogprobs
from etude.inference.server.bodies import CompletionBody, body_of, first, invalid
from etude.inference.server.choices import Choice, Detokenizer, EngineEnded, drained
from etude.inference.server.grammars import answer_rule
from etude.inference.server.http import check_room, check_score_room, error_of
from etude.inference.server.served_model import ServedModel
from etude.protocol.apis import answered_lines, answering, merge_streams
from etude.protocol.apis.chat import error, sse, usage
from etude.records import Generation

_SCORED = 1 << 29  # logits of a prompt, in float32
_COMPLETION_TOKENS = 16  # OpenAI's default; chats go on to the end of the context


@dataclass
class _Prompt:
    """A prompt, its scores if requested, and its answers."""

    ids: list[int]
    text: str = ""  # for the echo
    scores: PromptScores | None = None
    choices: list[Choice] = field(default_factory=list)


class Completions:
    """The route of one model."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    async def answer(self, http: HTTPRequest) -> Response:
        """Answers a request. Raises Refusal, ValueError, RuntimeError or RequestFailed."""
        body = await body_of(http, CompletionBody)
        self._model.must_be_served(body.model)
        check_room(self._model.engine, body.count * len(body.prompts))
        prompts = [await self._prompt(body, prompt) for prompt in body.prompts]
        if body.prompt_logprobs is not None or (body.echo and body.logprobs is not None):
            await self._score(body, prompts)
        max_tokens = first(body.max_tokens, _COMPLETION_TOKENS)
        if max_tokens:
            await self._submit(body, prompts, max_tokens)
        head = {"id": f"cmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": self._model.names[0]}
        head["object"] = "text_completion"
        shown = [
            _Shown(self._model, body, index * body.count + number, prompt)
            for index, prompt in enumerate(prompts)
            for number in range(body.count)
        ]
        if body.stream:
            lines = answered_lines((), self._lines(body, prompts, shown, head), lambda refusal: sse(error(refusal)))
            return StreamingResponse(lines, media_type="text/event-stream")
        generations = await drained(http, [choice for prompt in prompts for choice in prompt.choices])
        with answering():
            choices = [each.whole() for each in shown]
            return JSONResponse(head | {"choices": choices, "usage": _usage(prompts, generations)})

    async def _prompt(self, body: CompletionBody, prompt: str | list[int]) -> _Prompt:
        whole = body.add_special_tokens is not False and not body.suffix
        ids = await self._model.encode(prompt, whole) if isinstance(prompt, str) else prompt
        if body.suffix:
            self._model.check_characters(len(body.suffix))
            ids = self._model.fill_in(ids, body.suffix, body.add_special_tokens is not False)
        text = ""
        if body.echo:
            _check_ids(ids, self._model.engine.vocab_size)
            text = prompt if isinstance(prompt, str) else self._model.tokenizer.decode(ids, skip_special_tokens=False)
        return _Prompt(ids, text)

    async def _score(self, body: CompletionBody, prompts: list[_Prompt]) -> None:
        """Computes the log-probabilities of prompts, if they are shown."""
        engine, top = self._model.engine, max(body.logprobs or 0, body.prompt_logprobs or 0)
        check_score_room(engine, len(prompts))
        scored = [prompt for prompt in prompts if len(prompt.ids) > 1]
        longest = _SCORED // engine.vocab_size
        if any(len(prompt.ids) > longest for prompt in scored):
            raise invalid(f"log-probabilities are limited to prompts of at most {longest} tokens", "prompt")
        futures = [asyncio.wrap_future(engine.score_prompt(prompt.ids, top)) for prompt in scored]
        for prompt, (_, scores) in zip(scored, await asyncio.gather(*futures), strict=True):
            prompt.scores = scores

    async def _submit(self, body: CompletionBody, prompts: list[_Prompt], max_tokens: int) -> None:
        rule = answer_rule(body)
        grammar = None if rule is None else (f"start: answer\n{rule[0]}", rule[1])
        seed = body.first_seed
        detokenizer = partial(Detokenizer, self._model.tokenizer, bool(body.skip_special_tokens))
        try:
            for number, prompt in enumerate(prompts):
                prompt.choices = await self._model.choices(
                    body,
                    prompt.ids,
                    max_tokens,
                    seed=seed + number * body.count,
                    top_logprobs=body.logprobs or 0,
                    grammar=grammar,
                    detokenizer=detokenizer,
                    stops=body.stops,
                    keep_stop=bool(body.include_stop_str_in_output),
                )
        except BaseException:
            _abort(prompts)
            raise

    async def _lines(
        self, body: CompletionBody, prompts: list[_Prompt], shown: list[_Shown], head: dict[str, Any]
    ) -> AsyncIterator[bytes]:
        with_usage = body.stream_options is not None and body.stream_options.include_usage
        more = {"usage": None} if with_usage else {}
        try:
            for each in shown:
                if body.echo:
                    yield sse(head | {"choices": [each.echo()]} | more)
            choices = [choice for prompt in prompts for choice in prompt.choices]
            async for index, text in merge_streams([choice.grow() for choice in choices]):
                if text is not None and (part := shown[index].part(text)) is not None:
                    yield sse(head | {"choices": [part]} | more)
            if with_usage:
                generations = [await choice.settled() for choice in choices]
                yield sse(head | {"choices": [], "usage": _usage(prompts, generations)})
            yield b"data: [DONE]\n\n"
        except (EngineEnded, RequestFailed) as e:
            yield b"data: " + bytes(error_of(e).body) + b"\n\n"
        finally:
            _abort(prompts)


class _Shown:
    """The form of one answer. `_shown` tokens of it are in the stream already, which end at character `_offset`."""

    def __init__(self, model: ServedModel, body: CompletionBody, index: int, prompt: _Prompt) -> None:
        self._model, self._body, self._index, self._prompt = model, body, index, prompt
        self._shown = self._offset = 0

    @property
    def _choice(self) -> Choice | None:
        return self._prompt.choices[self._index % self._body.count] if self._prompt.choices else None

    def whole(self) -> dict[str, Any]:
        """The complete answer."""
        choice = self._choice
        logprobs = self._logprobs(self._body.echo or False, choice)
        text = self._prompt.text + (choice.text if choice is not None else "")
        shown = self._shape(text, logprobs, choice.reason if choice is not None else "length")
        if self._body.prompt_logprobs is not None:
            shown["prompt_logprobs"] = self._ranked(self._body.prompt_logprobs)
        if self._body.return_token_ids:
            shown |= {"token_ids": choice.ids if choice is not None else [], "prompt_token_ids": self._prompt.ids}
        return shown

    def echo(self) -> dict[str, Any]:
        """The prompt, as the first part of a stream."""
        done = "length" if self._choice is None else None
        return self._shape(self._prompt.text, self._logprobs(True, None), done)

    def part(self, text: str) -> dict[str, Any] | None:
        """A further part of a stream; None if there is nothing new to show."""
        choice = self._choice
        assert choice is not None
        if not text and not choice.reason:
            return None
        ids = choice.ids[self._shown :]
        shown = self._shape(text, self._logprobs(False, choice), choice.reason or None)
        self._shown = len(choice.ids)
        return shown | ({"token_ids": ids} if self._body.return_token_ids else {})

    def _shape(self, text: str, logprobs: dict[str, Any] | None, reason: str | None) -> dict[str, Any]:
        return {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, with_prompt: bool, choice: Choice | None) -> dict[str, Any] | None:
        """The tokens that are not yet in the stream, in OpenAI's old format of log-probabilities."""
        if self._body.logprobs is None:
            return None
        ids: list[int] = []
        logprobs: list[float | None] = []
        tops: list[TopLogprobs] = []
        if with_prompt:
            ids += self._prompt.ids
            scores = self._prompt.scores
            logprobs += [None, *(scores.log_probs.tolist() if scores is not None else ())]
            tops += [[], *(scores.tops if scores is not None and scores.tops else [[]] * (len(ids) - 1))]
        if choice is not None:
            ids += choice.ids[self._shown :]
            logprobs += choice.logprobs[self._shown :]
            tops += choice.tops[self._shown :] or [[]] * (len(choice.ids) - self._shown)
        texts = [self._model.token(token) for token in ids]
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        shown = [
            None if logprob is None else self._top(token, logprob, top)
            for token, logprob, top in zip(ids, logprobs, tops, strict=True)
        ]
        return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": shown, "text_offset": offsets}

    def _top(self, token: int, logprob: float, top: TopLogprobs) -> dict[str, float]:
        """The most probable tokens by their text, and the token itself."""
        best = top[: self._body.logprobs or 0]
        return {self._model.token(i): p for i, p in reversed([*best, (token, logprob)])}

    def _ranked(self, count: int) -> list[dict[str, Any] | None]:
        """The prompt's log-probabilities in vLLM's format."""
        shown: list[dict[str, Any] | None] = [None]
        if (scores := self._prompt.scores) is None:
            return shown
        rows = zip(self._prompt.ids[1:], scores.log_probs.tolist(), scores.ranks.tolist(), strict=True)
        for place, (token, logprob, rank) in enumerate(rows):
            best = [(i, p, r) for r, (i, p) in enumerate(scores.tops[place][:count], 1)] if scores.tops else []
            entries = {i: (p, r) for i, p, r in best} | {token: (logprob, rank)}
            shown.append(
                {
                    str(i): {"logprob": p, "rank": r, "decoded_token": self._model.token(i)}
                    for i, (p, r) in entries.items()
                }
            )
        return shown


def _check_ids(ids: list[int], vocab_size: int) -> None:
    if not ids:
        raise invalid("the prompt is empty", "prompt")
    if not 0 <= min(ids) <= max(ids) < vocab_size:
        raise invalid(f"a prompt token is outside the vocabulary of {vocab_size}", "prompt")


def _abort(prompts: list[_Prompt]) -> None:
    for prompt in prompts:
        for choice in prompt.choices:
            choice.sequence.abort()


def _usage(prompts: list[_Prompt], generations: list[Generation]) -> dict[str, Any]:
    return usage(sum(len(prompt.ids) for prompt in prompts), generations)
