"""The prompt of an apply model, whose answer is the whole new file.

    <instruction>...</instruction><code> FILE </code><update> SKETCH </update>  ->  <updated-code> FILE </updated-code>

In prompt and answer a file follows its tag and a line end, so both tokenise alike, and the closing tag ends the answer.
All tags get a suffix if the texts themselves hold one of the tags.
"""

import hashlib
from dataclasses import dataclass

_TAGS = ("instruction", "code", "update", "updated-code")


@dataclass(frozen=True)
class EditPrompt:
    """The prompt for an edit. `content` is the user's message; the answer begins with `opening`, which the model gets,
    and ends with `close`."""

    content: str
    opening: str
    close: str


def edit_prompt(file: str, sketch: str, instruction: str = "") -> EditPrompt:
    """The prompt for an edit."""
    suffix = _suffix(file + sketch + instruction)
    content = (
        f"<instruction{suffix}>{instruction}</instruction{suffix}>\n"
        f"<code{suffix}>\n{file}</code{suffix}>\n<update{suffix}>\n{sketch}</update{suffix}>\n"
    )
    return EditPrompt(content, f"<updated-code{suffix}>\n", f"</updated-code{suffix}>")


def _suffix(texts: str) -> str:
    """A suffix that makes the tags differ from those in the texts; empty if the texts hold none."""
    suffix, tries = "", 0
    while any(f"<{name}{suffix}>" in texts or f"</{name}{suffix}>" in texts for name in _TAGS):
        suffix = "-" + hashlib.blake2b(f"{tries}{texts}".encode("utf-8", "surrogatepass"), digest_size=3).hexdigest()
        tries += 1
    return suffix
