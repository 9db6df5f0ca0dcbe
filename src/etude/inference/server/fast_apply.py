"""Fast apply: the request for a whole file with a sketched edit applied, and the collector of its answer.

The prompt is that of `etude.edits.formats`. Most of the answer repeats the file, so the request has drafts: the
deterministic merge, the file and the sketch.
"""

from __future__ import annotations

from tokenizers import Tokenizer

from etude.edits import DoesNotFit, Edit, NotClosed, edit_prompt
from etude.inference.engine.drafts import DraftSource, encode_after
from etude.inference.engine.requests import Request, RunningSequence
from etude.renderers import PlainEncoder, Renderer

_SLACK = 256  # tokens that an answer may have beyond file and sketch


class Applier:
    """Requests and answers with the tokenizer of one model."""

    def __init__(self, tokenizer: Tokenizer, renderer: Renderer | None) -> None:
        self._tokenizer = tokenizer
        self._renderer = renderer
        self.encoder = PlainEncoder(tokenizer)

    def request(self, edit: Edit, max_length: int, *, temperature: float = 0.0, seed: int = 0) -> tuple[Request, str]:
        """The request and the tag that closes its answer. Raises UserError for an edit that cannot be placed, and
        DoesNotFit if file, sketch and answer do not fit into `max_length` tokens."""
        merged = edit.draft().text
        question = edit_prompt(edit.text, edit.sketch, edit.instruction)
        opening, close = question.opening, question.close
        if self._renderer is not None:
            prompt = self._renderer.prompt([{"role": "user", "content": question.content}])
            stop = self._renderer.stop_ids
        else:
            prompt, stop = self.encoder.encode(question.content), ()
        prompt = prompt + self.encoder.encode(opening)
        texts = {"merge": merged + close, "file": edit.text + close, "sketch": edit.sketch}
        encode = self.encoder.encode
        sources = tuple(DraftSource(name, encode_after(encode, opening, text)) for name, text in texts.items())
        needed = max(len(source.ids) for source in sources)
        if len(prompt) + needed >= max_length:
            raise DoesNotFit(
                f"the edit needs {len(prompt)} tokens of prompt and {needed} of answer, and the model has a context of "
                f"{max_length}: use a model with a longer context, or split the file"
            )
        limit = min(len(sources[0].ids) + len(sources[-1].ids) + _SLACK, max_length - len(prompt))
        request = Request(
            ids=prompt, max_tokens=limit, temperature=temperature, stop=tuple(stop), seed=seed, sources=sources
        )
        return request, close

    def encode_answer(self, text: str) -> list[int]:
        """Ids of an answer's text after its opening tag."""
        return encode_after(self.encoder.encode, "<updated-code>\n", text).tolist()

    def collector(self, close: str) -> AnswerCollector:
        """A collector of the answer that the tag `close` ends."""
        return AnswerCollector(self._tokenizer, close)


class AnswerCollector:
    """Collects sampled tokens, and ends the sequence with the closing tag; the `on_token` of `Engine.submit`."""

    def __init__(self, tokenizer: Tokenizer, close: str) -> None:
        self._tokenizer = tokenizer
        self._close = close
        # A tag is at most as many tokens as bytes.
        self._window = len(close.encode()) + 1
        self._sequence: RunningSequence | None = None
        self.ids: list[int] = []
        self.closed = False

    def __call__(self, token: int, _: float) -> None:
        if self.closed:
            return
        self.ids.append(token)
        self.closed = self._close in self._decode(self.ids[-self._window :])
        if self.closed and self._sequence is not None:
            self._sequence.abort()

    def watch(self, sequence: RunningSequence) -> None:
        """Set the sequence that the closing tag ends."""
        self._sequence = sequence
        if self.closed:
            sequence.abort()

    def text(self) -> str:
        """The new file. Raises NotClosed if the model did not close its answer."""
        if not self.closed:
            raise NotClosed(
                f"the model wrote {len(self.ids)} tokens without ending the file: it is no apply model; give one with "
                "--model, or merge without a model"
            )
        return self._decode(self.ids).partition(self._close)[0]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)
