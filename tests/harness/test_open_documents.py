"""Open files and results as documents: how files are cut, what the engine is sent, what the ledger keeps."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from etude.config import ServerConfig
from etude.harness.documents import open_file, pieces
from etude.harness.loop import EngineModel, EpisodeSpec, Sampling, UngradedEpisode, turn_seed
from etude.harness.token_ledger import TokenLedgerError
from etude.protocol.backends.client import EngineClient
from etude.protocol.wire import GenerateRequest
from etude.records import Budget, CodeTask, Focus, Generation, StopReason, token_digest
from etude.renderers import Renderer, renderer_for
from etude.renderers.base import document_text
from etude.run.engines import engine_url, spawn_engine
from etude.sandbox.base import TestReport
from tests.harness.test_loop import WIDE, Routed, play
from tests.helpers.speakers import PATH, SOURCE, MemoryBox, Scripted, Speaker, a_box, a_task, play_task

NANO = Path(__file__).parents[2] / "models" / "nano"
SQUID = Sampling(documents=True)
ROOM = msgspec.structs.replace(WIDE, tokens=10_000)  # documents get what the tokens to be sampled leave
RECIPE = "own sink, no repair"
LONG = "\n".join(f"line {i} of a file that is worth a document" for i in range(40)) + "\n"

MODULE = '''"""A module."""

import os
LIMIT = 3


# Above a function.
@staticmethod
def one(x):
    return x + 1

def two(x):

    return x + 2
TABLE = {1: one,
         2: two}
print(TABLE)

class Three:
    def method(self):
        return 3
# the end
'''


class Squid(Scripted):
    """Says how documents were computed, as the engine does."""

    async def generate(self, request: GenerateRequest, *rest: Any) -> Generation:
        generation = await super().generate(request, *rest)
        return msgspec.structs.replace(generation, recipe=RECIPE if request.documents else "")


@pytest.fixture(params=["compact", "hermes"])
def dialect(request: pytest.FixtureRequest) -> tuple[Renderer, Speaker]:
    return request.getfixturevalue(request.param), Speaker(request.getfixturevalue(f"{request.param}_folder"))


def without_blanks(text: str) -> list[str]:
    return [line for line in text.split("\n") if line.strip()]


def test_a_file_is_cut_between_top_level_statements() -> None:
    found = pieces(MODULE)
    assert [(p.first, p.last) for p in found] == [(1, 4), (8, 10), (12, 14), (15, 17), (19, 22)]
    assert found[1].text.startswith("# Above a function.\n@staticmethod\ndef one")
    assert found[3].text == "TABLE = {1: one,\n         2: two}\nprint(TABLE)"
    assert found[4].text.endswith("# the end")


@pytest.mark.parametrize(
    "text", [MODULE, SOURCE, Path(json.__file__).read_text(), "x = 1\f\ny = 2", "a = 1;\\\n b = 2"]
)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_pieces_are_the_whole_file_but_blank_lines(text: str, end: str) -> None:
    found = pieces(text.replace("\n", end))
    assert without_blanks("\n".join(p.text for p in found).replace("\r\n", "\n")) == without_blanks(text)
    assert [p.first for p in found] == sorted({p.first for p in found})


def test_what_is_no_python_is_one_piece() -> None:
    assert [p.text for p in pieces("# Title\n\nnot python at all\n")] == ["# Title\n\nnot python at all"]
    assert [p.text for p in pieces("x = '\udcff'\ny = (\n")] == ["x = '\udcff'\ny = ("]
    assert pieces("") == pieces("\n \n") == []


def encode(title: str, text: str) -> list[int]:
    return list(document_text(title, text).encode())


def focus(first: int, last: int) -> Focus:
    return Focus(path="m.py", first_line=first, last_line=last)


def test_the_nearest_pieces_come_first_and_stand_in_the_order_of_the_file() -> None:
    whole = [encode("m.py", p.text) for p in pieces(MODULE)]
    assert open_file(MODULE, focus(8, 10), encode, 10_000, shown=False) == whole
    assert open_file(MODULE, focus(8, 10), encode, 10_000, shown=True) == [whole[0], *whole[2:]], "the prompt shows it"
    assert open_file(MODULE, focus(20, 21), encode, 10_000, shown=True) == whole, "a method is less than its class"
    room = len(whole[2]) + len(whole[3])
    assert open_file(MODULE, focus(12, 14), encode, room, shown=False) == [whole[2], whole[3]]
    assert open_file(MODULE, focus(12, 14), encode, len(whole[2]) - 1, shown=False) == []


def test_tasks_of_one_file_share_all_pieces_but_the_broken_ones() -> None:
    one, two = MODULE.replace("x + 1", "x - 1"), MODULE.replace("x + 2", "x - 2")
    first = open_file(one, focus(8, 10), encode, 10_000, shown=True)
    second = open_file(two, focus(12, 14), encode, 10_000, shown=True)
    assert len([ids for ids in first if ids in second]) == 3


def documents_of(request: GenerateRequest) -> list[list[int]]:
    return [list(ids) for ids in request.documents]


def test_the_open_file_stands_before_the_conversation(dialect: tuple[Renderer, Speaker]) -> None:
    """One segment, documents first; the prompt is what it is without them, but for a sentence that tells of them."""
    renderer, speaker = dialect
    script = [speaker.turn(("list", {})), speaker.turn(("finish", {}))]
    policy, plain = Squid(script), Scripted(script)
    draft = play(renderer, policy, ROOM, sampling=SQUID)
    without = play(renderer, plain)
    sent = documents_of(policy.requests[0])
    expected = [renderer.document(PATH, p.text) for p in pieces(SOURCE)]
    assert sent == expected
    assert documents_of(policy.requests[1]) == sent
    assert plain.requests[0].documents == ()
    if speaker.compact:
        assert policy.prompts == plain.prompts
    (segment,), (bare,) = draft.segments, without.segments
    ids, mask, *_ = segment.arrays()
    flat = [token for one in sent for token in one]
    assert ids[: len(flat)].tolist() == flat
    assert ids[len(flat) :].tolist()[: len(policy.prompts[1])] == policy.prompts[1]
    assert not mask[: segment.prompt_length].any()
    assert segment.prompt_length == len(flat) + len(policy.prompts[0])
    assert [(d.length, d.digest) for d in segment.documents] == [(len(one), token_digest(one)) for one in sent]
    assert (segment.recipe, bare.documents, bare.recipe) == (RECIPE, (), "")
    assert draft.metrics["documents"] == len(sent)
    assert draft.metrics["document_tokens"] == 2 * len(flat)
    assert "documents" not in without.metrics


def test_documents_leave_room_for_what_may_be_sampled(dialect: tuple[Renderer, Speaker]) -> None:
    renderer, speaker = dialect
    script = [speaker.turn(("finish", {}))]
    prompt = play(renderer, Scripted(script)).segments[0].prompt_length
    size = sum(len(renderer.document(PATH, p.text)) for p in pieces(SOURCE))
    policy = Squid(script)
    budget = Budget(turns=9, tokens=100, context=prompt + 100 + size // 2, seconds=60.0)
    draft = play(renderer, policy, budget, sampling=SQUID)
    assert draft.stop_reason is StopReason.FINISHED
    assert sum(map(len, documents_of(policy.requests[0]))) <= size // 2


def reading(speaker: Speaker, box: MemoryBox) -> tuple[tuple[str, dict[str, object]], str]:
    """A call with a long result, and the title of the document that it becomes."""
    if speaker.compact:
        box.files["src/long.py"] = LONG.encode()
        return ("grep", {"pattern": "worth"}), "search for worth"
    box.files["src/long.py"] = LONG.encode()
    return ("read", {"path": "src/long.py"}), "src/long.py"


def read_twice(
    renderer: Renderer, speaker: Speaker, policy_of: Any, **sampling: Any
) -> tuple[UngradedEpisode, Any, str]:
    box = a_box()
    call, title = reading(speaker, box)
    turns = [
        speaker.turn(("list", {})),
        speaker.turn(call, ("list", {})),
        speaker.turn(call),
        speaker.turn(("finish", {})),
    ]
    policy = policy_of(turns)
    return play(renderer, policy, ROOM, box=box, sampling=Sampling(documents=True, **sampling)), policy, title


def test_a_long_result_becomes_a_document_and_begins_a_segment(dialect: tuple[Renderer, Speaker]) -> None:
    """What was said before it is the prompt of the new segment, token by token, and trained on in the old one."""
    renderer, speaker = dialect
    draft, policy, title = read_twice(renderer, speaker, Squid)
    first, second = draft.segments
    result = draft.turns[1].results[0]
    sent = [documents_of(request) for request in policy.requests]
    assert sent[0] == sent[1]
    assert sent[2] == [*sent[0], renderer.document(title, result)]
    assert sent[3] == sent[2], "the same text is no second document"
    said = policy.turns
    pointer = f"[see document {title}]"
    expected = policy.prompts[1] + said[1] + renderer.bridge(said[1], "stop", [pointer, draft.turns[1].results[1]])
    assert policy.prompts[2] == expected
    assert policy.prompts[3] == expected + said[2] + renderer.bridge(said[2], "stop", [pointer])
    masks = [segment.arrays()[1] for segment in draft.segments]
    assert [int(mask.sum()) for mask in masks] == [len(said[0]) + len(said[1]), len(said[2]) + len(said[3])]
    assert second.prompt_length == sum(map(len, sent[2])) + len(expected)
    ids = second.arrays()[0]
    assert ids[sum(map(len, sent[2])) : second.prompt_length].tolist() == expected
    assert [len(s.turn_starts) for s in draft.segments] == [2, 2]
    assert (len(first.documents), len(second.documents)) == (len(sent[0]), len(sent[2]))
    assert (draft.metrics["segments"], draft.metrics["turns"]) == (2, 4)
    assert draft.metrics["sampled_tokens"] == sum(map(len, said))
    assert draft.metrics["tokens_prefix_property"] == 4
    assert [r.seed for r in policy.requests] == [turn_seed(7, n) for n in range(4)]


class RoutedSquid(Routed):
    async def generate(self, request: GenerateRequest, *rest: Any) -> Generation:
        """Positions count documents."""
        before = [token for one in request.documents for token in one]
        generation = await super().generate(msgspec.structs.replace(request, ids=before + request.ids), *rest)
        self.prompts[-1] = request.ids
        self.requests[-1] = request
        return msgspec.structs.replace(generation, recipe=RECIPE)


def test_a_new_segment_asks_for_the_experts_of_all_its_positions(dialect: tuple[Renderer, Speaker]) -> None:
    renderer, speaker = dialect
    draft, policy, _ = read_twice(renderer, speaker, RoutedSquid, routes=True)
    asked = [request.routes_from for request in policy.requests]
    first = sum(map(len, documents_of(policy.requests[0]))) + len(policy.prompts[0]) + len(policy.turns[0]) - 1
    assert asked[:3] == [0, first, 0]
    assert asked[3] > 0
    for segment in draft.segments:
        assert segment.routes is not None
        assert segment.routes.end == np.flatnonzero(segment.arrays()[1])[-1]


def test_short_results_and_errors_stay_text(hermes: Renderer, hermes_folder: Path) -> None:
    speaker = Speaker(hermes_folder)
    calls = [("read", {"path": "README"}), ("grep", {"pattern": "zzz"}), ("read", {"path": "no" * 300})]
    policy = Squid([speaker.turn(*calls), speaker.turn(("finish", {}))])
    draft = play(hermes, policy, ROOM, sampling=SQUID)
    assert len(draft.segments) == 1
    said = policy.turns[0]
    assert policy.prompts[1] == policy.prompts[0] + said + hermes.bridge(said, "stop", draft.turns[0].results)


def test_a_result_that_does_not_fit_ends_the_episode_as_ever(hermes: Renderer, hermes_folder: Path) -> None:
    speaker, box = Speaker(hermes_folder), a_box()
    call, _ = reading(speaker, box)
    script = [speaker.turn(call), speaker.turn(("finish", {}))]
    prompt = play(hermes, Scripted(script)).segments[0].prompt_length
    budget = msgspec.structs.replace(WIDE, context=prompt + 200, tokens=100)
    draft = play(hermes, Squid(script), budget, box=box, sampling=SQUID)
    assert (draft.stop_reason, len(draft.segments)) == (StopReason.TOKENS, 1)


@pytest.mark.parametrize("recipe", ["", "another"])
def test_an_engine_that_dropped_the_documents_is_noticed(compact: Renderer, compact_folder: Path, recipe: str) -> None:
    speaker = Speaker(compact_folder)

    class Changing(Squid):
        async def generate(self, request: GenerateRequest, *rest: Any) -> Generation:
            generation = await super().generate(request, *rest)
            return msgspec.structs.replace(generation, recipe=recipe) if len(self.prompts) > 1 else generation

    with pytest.raises(TokenLedgerError, match="computed the documents as"):
        play(compact, Changing([speaker.turn(("list", {})), speaker.turn(("finish", {}))]), ROOM, sampling=SQUID)


# --- a real engine ----------------------------------------------------------------------------------------------------

FUNCTIONS = [
    f"def f{n}(x):\n    total = x + {n}\n    for i in range({n}):\n        total += i * x\n    return total"
    for n in range(4)
]
LIBRARY = "import os\n\n\n" + "\n\n\n".join(FUNCTIONS) + "\n"


def broken(n: int) -> tuple[CodeTask, str]:
    text = LIBRARY.replace(f"x + {n}\n", f"x - {n}\n")
    first = 4 + 7 * n
    task = msgspec.structs.replace(
        a_task(),
        prompt=f"Fix `f{n}` in {PATH}",
        focus=Focus(path=PATH, first_line=first, last_line=first + 4),
        visible_tests=(),
    )
    return task, text


@pytest.mark.slow
def test_documents_are_computed_once_for_a_group_and_for_tasks_of_a_repository(tmp_path: Path) -> None:
    """Two tasks, three members each, in the bundled model's server: every piece of the file is computed once."""
    config = ServerConfig(model=str(NANO), port=0, threads=1, cache_mb=64, max_model_len=1024)
    child = spawn_engine(config, tmp_path)
    try:
        url = engine_url(child, tmp_path)
        drafts, health = asyncio.run(_two_groups(url))
    finally:
        child.stop(20)
    renderer = renderer_for(NANO)
    distinct = [renderer.document(PATH, text) for text in ("import os", *FUNCTIONS)]
    counters = health["documents"]
    assert (counters["misses"], counters["entries"]) == (5, 5)
    assert counters["missed_tokens"] == sum(map(len, distinct))
    # Three of the second task's four are known; those that the prefix cache has by then are not looked up.
    assert counters["hits"] >= 1
    total = {name: sum(d.metrics[name] for d in drafts) for name in ("document_tokens", "cached_document_tokens")}
    assert total["document_tokens"] - total["cached_document_tokens"] == counters["missed_tokens"]
    assert all(len(d.segments[0].documents) == 4 for d in drafts)


async def _two_groups(url: str) -> tuple[list[UngradedEpisode], dict[str, Any]]:
    renderer, budget = renderer_for(NANO), Budget(turns=1, tokens=24, context=1024, seconds=60.0)
    async with EngineClient([url]) as client:

        async def one(n: int, member: int) -> UngradedEpisode:
            task, text = broken(n)
            box = MemoryBox({PATH: text.encode()}, lambda _: TestReport({}, {}, 0.0))
            return await play_task(EpisodeSpec(task, EngineModel(client, renderer, SQUID), budget, member), box)

        drafts: list[UngradedEpisode] = []
        for n in (1, 3):
            drafts += await asyncio.gather(*(one(n, member) for member in range(3)))
        return drafts, await client.health(url)
