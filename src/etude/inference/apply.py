"""Fast apply: the request that asks a model to write a whole file with a sketched edit in it, and its answer.

    <instruction>...</instruction><code> FILE </code><update> SKETCH </update>  ->  <updated-code> FILE </updated-code>

The answer is mostly the file, so the request brings its drafts: the deterministic merge, the file, the sketch. Bytes
are sacred: the file follows a tag and a line end in prompt and answer alike, so both tokenise alike, and the closing
tag ends the answer. Tags take a suffix if the texts hold one.
"""

from __future__ import annotations

import hashlib

from tokenizers import Tokenizer

from etude.errors import UserError
from etude.harness.renderers import Renderer
from etude.harness.renderers.base import PlainEncoder
from etude.inference.drafts import Source, encode_after
from etude.inference.edit import Edit
from etude.inference.rows import Request, Row

_SLACK = 256  # tokens that an answer may have beyond file and sketch


class Applier:
    """Requests and answers in the language of one model."""

    def __init__(self, tokenizer: Tokenizer, renderer: Renderer | None) -> None:
        self._tokenizer = tokenizer
        self._renderer = renderer
        self.encoder = PlainEncoder(tokenizer)

    def request(self, edit: Edit, max_length: int, *, temperature: float = 0.0, seed: int = 0) -> tuple[Request, str]:
        """The request and the tag that closes its answer.

        Raises UserError for an edit that cannot be placed, or if file, sketch and answer do not fit into `max_length`
        tokens.
        """
        merged = edit.merged()
        suffix = _suffix(edit)
        opening, close = f"<updated-code{suffix}>\n", f"</updated-code{suffix}>"
        content = (
            f"<instruction{suffix}>{edit.instruction}</instruction{suffix}>\n"
            f"<code{suffix}>\n{edit.text}</code{suffix}>\n<update{suffix}>\n{edit.sketch}</update{suffix}>\n"
        )
        if self._renderer is not None:
            prompt = self._renderer.prompt([{"role": "user", "content": content}])
            stop = self._renderer.stop_ids
        else:
            prompt, stop = self.encoder.encode(content), ()
        prompt = prompt + self.encoder.encode(opening)
        texts = {"merge": merged + close, "file": edit.text + close, "sketch": edit.sketch}
        encode = self.encoder.encode
        sources = tuple(Source(name, encode_after(encode, opening, text)) for name, text in texts.items())
        needed = max(len(source.ids) for source in sources)
        if len(prompt) + needed >= max_length:
            raise UserError(
                f"the edit needs {len(prompt)} tokens of prompt and {needed} of answer, and the model has a context of "
                f"{max_length}: use a model with a longer context, or split the file"
            )
        limit = min(len(sources[0].ids) + len(sources[2].ids) + _SLACK, max_length - len(prompt))
        request = Request(
            ids=prompt, max_tokens=limit, temperature=temperature, stop=tuple(stop), seed=seed, sources=sources
        )
        return request, close

    def encode_answer(self, text: str) -> list[int]:
        """Ids of an answer's text after its opening tag."""
        return encode_after(self.encoder.encode, "<updated-code>\n", text).tolist()

    def answer(self, close: str) -> Answer:
        return Answer(self._tokenizer, close)


class Answer:
    """Collects sampled tokens, and ends the row with the closing tag. Give it to `Engine.submit` as `on_token`."""

    def __init__(self, tokenizer: Tokenizer, close: str) -> None:
        self._tokenizer = tokenizer
        self._close = close
        # A tag is at most as many tokens as bytes.
        self._window = len(close.encode()) + 1
        self._row: Row | None = None
        self.ids: list[int] = []
        self.closed = False

    def __call__(self, token: int, _: float) -> None:
        if self.closed:
            return
        self.ids.append(token)
        self.closed = self._close in self._decode(self.ids[-self._window :])
        if self.closed and self._row is not None:
            self._row.abort()

    def watch(self, row: Row) -> None:
        """The row to end."""
        self._row = row
        if self.closed:
            row.abort()

    def text(self) -> str:
        """The new file. Raises UserError if the model never closed its answer."""
        if not self.closed:
            raise UserError(
                f"the model wrote {len(self.ids)} tokens without ending the file: it is no apply model; give one with "
                "--model, or merge without a model"
            )
        return self._decode(self.ids).partition(self._close)[0]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def _suffix(edit: Edit) -> str:
    """Nothing, or what makes the tags differ from those that the texts hold."""
    texts = edit.text + edit.sketch + edit.instruction
    names = ("instruction", "code", "update", "updated-code")
    suffix, tries = "", 0
    while any(f"<{name}{suffix}>" in texts or f"</{name}{suffix}>" in texts for name in names):
        suffix = "-" + hashlib.blake2b(f"{tries}{texts}".encode("utf-8", "surrogatepass"), digest_size=3).hexdigest()
        tries += 1
    return suffix
