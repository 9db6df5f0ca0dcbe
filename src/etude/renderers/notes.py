"""A note in a prompt that is known as tokens only: what a user said later, for a teacher that is to know it.

The note stands at the end of the last message, before what closes the message and opens the answer:

    <|user|>Rename `f` to `g`{note}<|end|><|assistant|>

A message of its own would break the alternation of roles that some chat templates keep, and need the messages again.
"""

from __future__ import annotations

from collections.abc import Sequence

from etude.renderers.base import Renderer


def note_place(renderer: Renderer, prompt_ids: Sequence[int]) -> int:
    """The offset in a prompt where a note belongs. Raises ValueError for a prompt that does not end as a user's
    message does under this renderer: of another model, or with other variables of its template."""
    one, other = (renderer.prompt([{"role": "user", "content": text}]) for text in ("x", "7"))
    length = 0
    while one[-1 - length] == other[-1 - length]:
        length += 1
    if list(prompt_ids[len(prompt_ids) - length :]) != one[len(one) - length :] or len(prompt_ids) <= length:
        raise ValueError("the prompt does not end as a message of a user does")
    return len(prompt_ids) - length
