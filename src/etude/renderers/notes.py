"""Places a note, given as tokens, in a prompt: a later message of the user that only a teacher may see.

The note stands at the end of the last message, before the tokens that close the message and open the answer:

    <|user|>Rename `f` to `g`{note}<|end|><|assistant|>

A message of its own would break the alternation of roles that some chat templates demand, and would need the messages
again.
"""

from __future__ import annotations

from collections.abc import Sequence

from etude.renderers.base import Renderer


def note_place(renderer: Renderer, prompt_ids: Sequence[int]) -> int:
    """The offset of a note in a prompt. Raises ValueError for a prompt that does not end like a user's message under
    this renderer: that of another model, or with other variables of its template."""
    one, other = (renderer.prompt([{"role": "user", "content": text}]) for text in ("x", "7"))
    length = 0
    while one[-1 - length] == other[-1 - length]:
        length += 1
    if list(prompt_ids[len(prompt_ids) - length :]) != one[len(one) - length :] or len(prompt_ids) <= length:
        raise ValueError("the prompt does not end as a message of a user does")
    return len(prompt_ids) - length
