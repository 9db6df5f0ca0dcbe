"""A turn counts the calls that its dialect's parser could not read, which its message shows as text."""

from __future__ import annotations

from pathlib import Path

import pytest

from etude.protocol.apis import SampledTurn
from etude.records import Generation
from etude.renderers import Renderer
from tests.helpers.speakers import Speaker

GOOD = '<tool_call>{"name": "read", "arguments": {}}</tool_call>'
BROKEN = '<tool_call>{"name": "read", "arguments": {]</tool_call>'


def _settled(renderer: Renderer, ids: list[int], finish: str = "stop", stops: tuple[str, ...] = ()) -> SampledTurn:
    turn = SampledTurn(renderer, 3, stops)
    numbers = {"logprobs": [0.0] * len(ids), "versions": [1] * len(ids)}
    turn.settle(Generation(ids=ids, finish_reason=finish, **numbers))  # pyright: ignore[reportArgumentType]
    return turn


@pytest.mark.parametrize(
    ("said", "finish", "malformed"),
    [
        (GOOD, "stop", 0),
        ("Only text", "stop", 0),
        (BROKEN, "stop", 1),
        (GOOD + BROKEN + BROKEN, "stop", 2),
        ('<tool_call>{"name": "read"', "stop", 1),
        ('<tool_call>{"name": "read"', "length", 1),
    ],
)
def test_the_server_counts_what_it_shows_as_text(
    hermes: Renderer, hermes_folder: Path, said: str, finish: str, malformed: int
) -> None:
    turn = _settled(hermes, Speaker(hermes_folder).encode(said), finish)
    assert turn.malformed == malformed
    assert turn.text.count("[malformed call") == malformed


def test_what_a_stop_text_cut_is_no_call(hermes: Renderer, hermes_folder: Path) -> None:
    ids = Speaker(hermes_folder).encode('Now <tool_call>{"name": "STOP')
    assert _settled(hermes, ids, stops=("STOP",)).malformed == 0
    assert _settled(hermes, ids).malformed == 1


def test_the_compact_dialect_counts_too(compact: Renderer, compact_folder: Path) -> None:
    speaker = Speaker(compact_folder)
    assert _settled(compact, speaker.encode("<|call|>edit<|arg|>a<|end|>")).malformed == 1
    assert _settled(compact, speaker.turn(("edit", {"old": "a", "new": "b"}))).malformed == 0
