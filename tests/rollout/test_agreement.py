"""Patches as lines, their agreement, and requests that do not give the patch away."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from etude.corpus import Chat, encode_chat
from etude.grading import open_sandbox
from etude.harness import EngineModel, Sampling
from etude.records import Budget
from etude.renderers import renderer_for
from etude.rollout.agreement import (
    AgreedPair,
    ChangeTarget,
    LeftOut,
    LinePatch,
    RepositoryTree,
    agreed_pair,
    agreement,
    checked_request,
    line_patch,
)
from etude.sandbox import Image
from tests.helpers.speakers import TEMPLATE, Scripted, hermes_tokenizer, write_model

BEFORE = {"a.py": b"x = 1\ny = 2\n\nz = 3\n", "gone.py": b"import os\n", "data.bin": b"\0\1"}


def test_a_patch_is_its_changed_lines_with_their_file_and_sign() -> None:
    patch = line_patch(BEFORE, {
        "a.py": b"x = 1\ny = 20\n\nz = 3  \n\n", "gone.py": None, "new.py": b"--- a\n+++ b\n",
        "data.bin": b"\0\2", "__pycache__/a.cpython-311.pyc": b"text",
    })  # fmt: skip
    assert patch.lines == {
        ("a.py", "-y = 2"): 1, ("a.py", "+y = 20"): 1, ("a.py", "-z = 3"): 1, ("a.py", "+z = 3"): 1,
        ("gone.py", "-import os"): 1, ("new.py", "+--- a"): 1, ("new.py", "++++ b"): 1,
    }  # fmt: skip
    assert patch.text.splitlines()[:3] == ["--- a/a.py", "+++ b/a.py", "@@ -1,4 +1,5 @@"]
    assert not line_patch(BEFORE, {"a.py": BEFORE["a.py"]}).lines
    assert not line_patch(BEFORE, {"a.py": BEFORE["a.py"] + b"\n\n"}).lines, "blank lines are no change"


def test_agreement_is_the_share_of_the_first_patch() -> None:
    def patch(path: str, *lines: str) -> LinePatch:
        return line_patch({}, {path: "\n".join(lines).encode()})

    first = patch("a.py", "a", "a", "b", "c")
    assert agreement(first, first) == 1
    assert agreement(first, patch("a.py", "a", "b", "d", "e", "f", "g")) == 0.5, "lines count as often as they stand"
    assert agreement(patch("a.py", "a"), first) == 1, "more than the first patch costs nothing"
    assert agreement(first, patch("b.py", "a", "a", "b", "c")) == 0


CHANGED = line_patch({"a.py": b"    y  =  total / count\nx = 1\n"}, {"a.py": b"    y = mean(values)\nx = 2\n"})


def test_a_request_is_a_title_and_a_body() -> None:
    assert checked_request("\n Mean of nothing \n\n\nIt fails for an empty list.\nIt should say so.\n", CHANGED) == (
        "Mean of nothing\n\nIt fails for an empty list.\nIt should say so."
    )
    for answer in ("", "Only a title", "---\n\nbody", "t" * 201 + "\n\nbody", "title\n\n" + "b" * 4000):
        with pytest.raises(LeftOut, match="no title and body"):
            checked_request(answer, CHANGED)


@pytest.mark.parametrize("body", [
    "Write y = mean(values) there.",
    "Write `y =\n  mean(values)` there.",
    "It says y = total / count now.",
    "Use\n```\nx = 2\n```",
    "Use\n\n- x = 2",
    "Use `x = 2` there.",
])  # fmt: skip
def test_a_request_that_quotes_a_changed_line_is_refused(body: str) -> None:
    with pytest.raises(LeftOut, match="quotes the patch"):
        checked_request(f"Mean\n\n{body}", CHANGED)


def test_short_lines_may_stand_in_sentences() -> None:
    assert checked_request("Mean\n\nFor x = 2 it is right.", CHANGED)


def test_turns_of_an_engine_are_learned_as_they_were_sampled(tmp_path: Path) -> None:
    renderer = renderer_for(write_model(tmp_path / "model", hermes_tokenizer(), TEMPLATE))
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/a.py").write_bytes(BEFORE["a.py"])

    def turn(text: str, **calls: dict[str, Any]) -> list[int]:
        made = [{"id": f"call_{n}", "type": "function", "function": {"name": name, "arguments": json.dumps(values)}}
                for n, (name, values) in enumerate(calls.items())]  # fmt: skip
        return renderer.turn({"role": "assistant", "content": text} | ({"tool_calls": made} if made else {}))

    look, change = turn("I look.", read={"path": "a.py"}), {"path": "a.py", "old": "y = 2\n", "new": "y = 2 + x\n"}
    first = [turn("", edit=change), turn("Done.")]
    second = [look, turn("", edit=change, finish={})]
    policy = Scripted([*first, turn("Grow with x\n\nThe second value is to depend on the first."), *second])
    tree = RepositoryTree({"a.py": BEFORE["a.py"]}, Image(tmp_path / "tree", None, {}))

    async def play() -> AgreedPair:
        async with open_sandbox() as sandbox:
            model = EngineModel(policy, renderer, Sampling())
            budget = Budget(turns=4, tokens=4000, context=40_000, seconds=60.0)
            return await agreed_pair(
                ChangeTarget("shop", "a.py", "f", 1, 4, "edge"), tree, sandbox, model, budget, 1, 0.5
            )

    pair = asyncio.run(asyncio.wait_for(play(), 60))
    assert pair.agreement == 1
    asked = renderer.text(policy.prompts[2])
    assert "-y = 2\n+y = 2 + x\n" in asked
    assert "<tools>" not in asked, "a request is written without tools"
    for played, turns in ((pair.first, first), (pair.second, second)):
        row = played.row()
        ids, mask = encode_chat(Chat("row", tuple(row["messages"]), tuple(row["tools"])), renderer)
        assert [int(i) for i, m in zip(ids, mask, strict=True) if m] == [id for each in turns for id in each]
