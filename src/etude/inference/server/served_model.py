"""One model for all routes: its engine, names, tokenizer and dialect, and requests to the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from etude.errors import UserError
from etude.inference.engine.drafts import DraftSource
from etude.inference.engine.engine import Engine
from etude.inference.engine.requests import PromptTooLong, Request
from etude.inference.engine.sampling_params import GrammarMatcher
from etude.inference.server.bodies import Body, invalid
from etude.inference.server.choices import Choice, Detokenizer
from etude.inference.server.fast_apply import Applier
from etude.inference.server.grammars import Grammars
from etude.inference.server.http import check_room
from etude.protocol import Refusal
from etude.renderers import LONGEST_TOKEN, Renderer, middle_prompt, read_json, renderer_for, say_dropped


class ServedModel:
    """An engine and its model folder. Answers name the first of `names`."""

    def __init__(self, engine: Engine, folder: Path, names: Sequence[str] = ()) -> None:
        self.engine = engine
        self.names = tuple(names) or (folder.resolve().name,)
        self.created = int(time.time())
        self.renderer: Renderer | None = None
        self.no_chat = ""
        self._tokenizer: Tokenizer | None = None
        if (folder / "tokenizer.json").is_file():
            self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        try:
            self.renderer = renderer_for(folder, tools=False)
            say_dropped(self.renderer)
        except UserError as e:
            self.no_chat = str(e)
        self.stop_ids = self.renderer.stop_ids if self.renderer is not None else _end_ids(folder)
        if self._tokenizer is not None:
            self.applier = Applier(self._tokenizer, self.renderer)
            self.grammars = Grammars(self._tokenizer, engine.vocab_size, self.stop_ids)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises Refusal for a model without one."""
        if self._tokenizer is None:
            raise invalid("the model folder has no tokenizer.json: send the prompt to /generate as token ids")
        return self._tokenizer

    @property
    def chat_renderer(self) -> Renderer:
        """The renderer of chats. Raises Refusal for a model that cannot chat."""
        if self.renderer is None:
            raise invalid(f"this model cannot chat: {self.no_chat}")
        return self.renderer

    def must_be_served(self, model: str) -> None:
        """Raises Refusal for another model's name; "" means any."""
        if model and model not in self.names:
            message = f"the model {model[:200]!r} is not served here; {self.names[0]!r} is"
            raise Refusal(404, message, "model_not_found", param="model")

    def check_characters(self, count: int) -> None:
        """Raises PromptTooLong for a text that is too long with any tokens."""
        if count > LONGEST_TOKEN * self.engine.max_length:
            raise PromptTooLong(
                f"this model's maximum context length is {self.engine.max_length} tokens, with the answer; "
                f"{count} characters are far more"
            )

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text; names of special tokens become special tokens, and the tokenizer may add some. Raises Refusal
        or PromptTooLong."""
        self.check_characters(len(text))
        tokenizer = self.tokenizer
        return await asyncio.to_thread(lambda: tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def fill_in(self, prefix: Sequence[int], suffix: str, add_special_tokens: bool = True) -> list[int]:
        """The prompt for the text between a prefix and a suffix, behind the tokens that the tokenizer may add. Raises
        Refusal for a model without tokens for this."""
        prompt = middle_prompt(self.tokenizer)
        if prompt is None:
            raise invalid("the model has no tokens to fill in the middle with: leave suffix out", "suffix")
        before = prompt.before if add_special_tokens else ()
        return [*before, *prompt.ids(prefix, self.applier.encoder.encode(suffix))]

    def bad_words(self, body: Body) -> tuple[tuple[int, ...], ...]:
        """The ids of the excluded words, both at the start of a text and within it."""
        encode = self.applier.encoder.encode
        return tuple(dict.fromkeys(tuple(encode(way)) for word in body.bad_words or () for way in (word, f" {word}")))

    async def sources(self, body: Body) -> tuple[DraftSource, ...]:
        """Drafts from the client's predicted text."""
        if body.prediction is None:
            return ()
        expected = body.prediction.plain()
        self.check_characters(len(expected))
        ids = await asyncio.to_thread(self.applier.encoder.encode, expected)
        return (DraftSource("prediction", np.array(ids, dtype=np.int32)),)

    async def choices(
        self,
        body: Body,
        prompt: list[int],
        max_tokens: int,
        *,
        seed: int,
        top_logprobs: int = 0,
        documents: tuple[list[int], ...] = (),
        grammar: tuple[str, str | None] | None = None,
        detokenizer: partial[Detokenizer] | None = None,
        stops: Sequence[str] = (),
        keep_stop: bool = False,
    ) -> list[Choice]:
        """Submits the `n` answers to a prompt. Raises ValueError, RuntimeError or Refusal."""
        matchers: list[GrammarMatcher | None] = [None] * body.count
        if grammar is not None:
            first = await asyncio.to_thread(self.grammars.matcher, *grammar)
            matchers = [first, *(first.deep_copy() for _ in range(body.count - 1))]
        sources, stop, words = await self.sources(body), body.stop_ids(self.stop_ids), self.bad_words(body)
        check_room(self.engine, body.count)
        choices: list[Choice] = []
        try:
            for number, matcher in enumerate(matchers):
                request = Request(
                    ids=prompt,
                    max_tokens=max_tokens,
                    temperature=1.0 if body.temperature is None else body.temperature,
                    top_p=body.mass,
                    stop=stop,
                    seed=seed + number,
                    session=body.user,
                    sources=sources,
                    documents=documents,
                    params=body.params(matcher, words, top_logprobs),
                )
                text = detokenizer() if detokenizer is not None else None
                choices.append(Choice(self.engine, request, text, stops, keep_stop))
        except BaseException:
            for choice in choices:
                choice.sequence.abort()
            raise
        return choices

    def token(self, token: int) -> str:
        """The text of one token."""
        return self.tokenizer.decode([token], skip_special_tokens=False)


def _end_ids(folder: Path) -> tuple[int, ...]:
    """The ids that end a text by the generation configuration, for a model without a dialect."""
    for name in ("generation_config.json", "config.json"):
        ids = read_json(folder / name).get("eos_token_id")
        if ids is not None:
            return tuple(ids) if isinstance(ids, list) else (ids,)
    return ()
