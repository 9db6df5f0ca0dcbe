"""Bodies of OpenAI's completions and chat completions, with vLLM's fields, and the refusal of unsupported fields.

Every known field is in one of three places: in a body class below, which implements it; in `NEUTRAL`, whose fields are
refused unless their value changes nothing; or in `HARMLESS`, whose fields never change the answer. All others are
refused by name, as OpenAI does.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, Self, TypeVar

import msgspec
from starlette.requests import Request as HTTPRequest

from etude.inference.engine.requests import MAX_STOP_IDS
from etude.inference.engine.sampling_params import MAX_COUNT, MAX_LOGPROBS, GrammarMatcher, SamplingParams
from etude.protocol import MAX_NAME, Refusal, decoded
from etude.protocol.apis import as_refusal, tools_of

MAX_CHOICES = 128
_MAX_STOPS, _MAX_STOP = 16, 1024  # number of strings, characters of each
_MAX_BAD_WORDS = 64
_ALL_MASS = 1e-9  # top_p 0: the most probable token alone

NEUTRAL: dict[str, tuple[Any, ...]] = {
    # other ways to sample
    "best_of": (1,), "use_beam_search": (False,), "length_penalty": (1,), "early_stopping": (False,),
    "modalities": (["text"],), "audio": (), "web_search_options": (), "verbosity": ("medium",), "moderation": (),
    # the prompt
    "functions": ([],), "function_call": ("none", "auto"), "prompt_embeds": (), "truncate_prompt_tokens": (-1,),
    "chat_template": (), "documents": ([],), "mm_processor_kwargs": ({},), "media_io_kwargs": ({},),
    # the form of the answer
    "guided_decoding_backend": (), "guided_whitespace_pattern": (), "structural_tag": (), "include_reasoning": (True,),
    "logits_processors": ([],), "vllm_xargs": ({},), "kv_transfer_params": ({},), "thinking_token_budget": (),
    "return_tokens_as_token_ids": (False,), "spaces_between_special_tokens": (True, False), "bad_words_ids": ([],),
    "repetition_detection": (), "logprob_token_ids": ([],),
}  # fmt: skip
"""Fields that other servers support and this one does not, with the values (besides null) that change nothing."""

_CHAT_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "echo": (False,),
    "suffix": ("",),
    "prompt_logprobs": (),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (),
    "add_special_tokens": (False,),
}
_COMPLETION_NEUTRAL: dict[str, tuple[Any, ...]] = {"top_logprobs": (), "tools": ([],), "tool_choice": ("none", "auto")}

HARMLESS = frozenset({
    "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "request_id", "priority", "cache_salt",
})  # fmt: skip


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Options for the content of a stream besides the answer."""

    include_usage: bool = False
    include_obfuscation: bool = False  # padding against observers of an encrypted stream; not sent
    continuous_usage_stats: bool = False


class ContentPart(msgspec.Struct, tag_field="type", tag="text"):
    """Plain text."""

    text: str


class Prediction(msgspec.Struct, tag_field="type", tag="content"):
    """Text that much of the answer is expected to repeat."""

    content: str | list[ContentPart]

    def plain(self) -> str:
        """The whole text."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class Body(msgspec.Struct, kw_only=True):
    """The fields of both routes."""

    model: str = ""
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    prediction: Prediction | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    return_token_ids: bool | None = None

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Self:
        """The body with these fields. Raises Refusal."""
        try:
            return msgspec.convert(fields, cls)
        except ValueError as e:
            name = re.search(r" - at `\$\.(\w+)", str(e))
            raise invalid(str(e), name[1] if name is not None else None) from None

    @property
    def count(self) -> int:
        """Number of answers to every prompt."""
        return 1 if self.n is None else self.n

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end the answer."""
        texts = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(filter(None, texts))

    @property
    def first_seed(self) -> int:
        """The seed of the first answer; the other answers take the following numbers."""
        return int.from_bytes(os.urandom(7)) if self.seed is None else self.seed & (2**62 - 1)

    def check(self) -> None:
        """Raises Refusal for errors that show before anything is encoded."""
        if not 1 <= self.count <= MAX_CHOICES:
            raise invalid(f"n must lie between 1 and {MAX_CHOICES}", "n")
        if len(self.stops) > _MAX_STOPS or any(len(stop) > _MAX_STOP for stop in self.stops):
            raise invalid(f"at most {_MAX_STOPS} stop strings of at most {_MAX_STOP} characters", "stop")
        if len(self.user or "") > MAX_NAME:
            raise invalid(f"user has at most {MAX_NAME} characters", "user")
        if self.top_p is not None and not 0.0 <= self.top_p <= 1.0:
            raise invalid(f"top_p must lie in [0, 1], got {self.top_p:g}", "top_p")
        if len(self.bad_words or ()) > _MAX_BAD_WORDS or not all(self.bad_words or ()):
            raise invalid(f"at most {_MAX_BAD_WORDS} bad words, none of them empty", "bad_words")
        if self.min_tokens and self.stops:
            raise invalid("min_tokens is not supported beside stop strings: use stop_token_ids", "min_tokens")
        if self.stream_options is not None and self.stream_options.continuous_usage_stats:
            raise invalid("continuous_usage_stats is not supported: leave it out", "stream_options")

    def stop_ids(self, own: tuple[int, ...]) -> tuple[int, ...]:
        """Ids that end an answer: the model's (`own`), and those of the body. Raises Refusal."""
        ids = tuple(dict.fromkeys([*(() if self.ignore_eos else own), *(self.stop_token_ids or ())]))
        if len(ids) > MAX_STOP_IDS:
            raise invalid(f"at most {MAX_STOP_IDS} ids end an answer", "stop_token_ids")
        if ids and not 0 <= min(ids) <= max(ids) <= MAX_COUNT:
            raise invalid(f"an id of stop_token_ids must lie in [0, {MAX_COUNT}]", "stop_token_ids")
        return ids

    def params(
        self, grammar: GrammarMatcher | None, bad_words: tuple[tuple[int, ...], ...], top_logprobs: int
    ) -> SamplingParams:
        """The engine's sampling parameters. Raises Refusal."""
        if grammar is not None:
            for name in ("allowed_token_ids", "bad_words", "min_tokens", "ignore_eos"):
                if getattr(self, name):
                    raise invalid(f"{name} is not supported beside a grammar: leave one out", name)
        try:
            bias = {int(token): value for token, value in (self.logit_bias or {}).items()}
        except ValueError:
            raise invalid("the keys of logit_bias are token ids", "logit_bias") from None
        return SamplingParams(
            top_k=max(0, self.top_k or 0),
            min_p=self.min_p or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=bias,
            bad_words=bad_words,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            allowed=None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
            min_tokens=self.min_tokens or 0,
            grammar=grammar,
            top_logprobs=top_logprobs,
        )

    @property
    def mass(self) -> float:
        """top-p for the engine, which does not accept 0."""
        return 1.0 if self.top_p is None else self.top_p or _ALL_MASS


class CompletionBody(Body, kw_only=True):
    """The body of /v1/completions. `prompt` is a text, ids, or a list of either."""

    prompt: str | list[Any]
    echo: bool | None = False
    suffix: str | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool | None = False
    skip_special_tokens: bool | None = False
    add_special_tokens: bool | None = True

    def check(self) -> None:
        """See `Body.check`."""
        super().check()
        for name, value in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if value is not None and not 0 <= value <= MAX_LOGPROBS:
                raise invalid(f"{name} must lie between 0 and {MAX_LOGPROBS}", name)
        if self.stream and self.prompt_logprobs is not None:
            raise invalid("prompt_logprobs are not streamed", "prompt_logprobs")
        if self.count * len(self.prompts) > MAX_CHOICES:
            raise invalid(f"at most {MAX_CHOICES} answers to all prompts together", "prompt")
        if self.suffix and (self.echo or self.prompt_logprobs is not None):
            raise invalid("a suffix is not supported beside echo and prompt_logprobs", "suffix")
        if self.max_tokens == 0 and not self.echo:
            raise invalid("max_tokens must be at least 1, or 0 with echo", "max_tokens")

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, all texts or all lists of ids. Raises Refusal."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise invalid("the prompt is empty", "prompt")
        if all(type(item) is int for item in prompt):
            return [prompt]
        if all(isinstance(item, str) for item in prompt):
            return prompt
        if all(isinstance(item, list) and all(type(token) is int for token in item) for item in prompt):
            return prompt
        raise invalid("the prompt is a text, a list of token ids, or a list of either", "prompt")


class ChatBody(Body, kw_only=True):
    """The body of /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    continue_final_message: bool | None = False
    add_generation_prompt: bool | None = None

    def check(self) -> None:
        """See `Body.check`."""
        super().check()
        if self.max_completion_tokens is not None and not 1 <= self.max_completion_tokens <= MAX_COUNT:
            raise invalid(f"max_completion_tokens must lie in [1, {MAX_COUNT}]", "max_completion_tokens")
        if not self.messages:
            raise invalid("messages must not be empty", "messages")
        if not 0 <= (self.top_logprobs or 0) <= MAX_LOGPROBS:
            raise invalid(f"top_logprobs must lie between 0 and {MAX_LOGPROBS}", "top_logprobs")
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs needs logprobs", "top_logprobs")
        if self.add_generation_prompt is not None and self.add_generation_prompt is bool(self.continue_final_message):
            raise invalid(
                "add_generation_prompt must be the opposite of continue_final_message", "add_generation_prompt"
            )
        for tool in self.tools or ():
            if tool.get("type") != "function":
                raise invalid(f"a tool of type {tool.get('type')!r} is not supported: describe a function", "tools")
        with as_refusal():
            tools_of({"tools": self.tools})


B = TypeVar("B", bound=Body)


async def body_of(http: HTTPRequest, kind: type[B]) -> B:
    """The body of the request, checked. Raises Refusal."""
    fields: dict[str, Any] = await decoded(http, dict[str, Any])
    own = _CHAT_NEUTRAL if kind is ChatBody else _COMPLETION_NEUTRAL
    refuse_others(fields, frozenset(kind.__struct_fields__), NEUTRAL | own)
    body = kind.of(fields)
    body.check()
    return body


def refuse_others(fields: Mapping[str, Any], done: frozenset[str], neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises Refusal for a field that is not in `done` and could change the answer."""
    for name in sorted(fields.keys() - done - HARMLESS):
        if name not in neutral:
            raise invalid(f"{name[:100]} is not a field of this route", name[:100])
        if fields[name] is not None and fields[name] not in neutral[name]:
            raise invalid(f"{name} is not supported: leave it out", name)


def invalid(message: str, param: str | None = None) -> Refusal:
    """The refusal of a wrong request."""
    return Refusal(400, message, param=param)


def first(*limits: int | None) -> int:
    """The first limit that is not None; the engine refuses 0."""
    return next(limit for limit in limits if limit is not None)
