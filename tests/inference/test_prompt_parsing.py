"""File and sketch, found again in the text of a prompt."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from etude.edits.edit import Edit
from etude.inference.server.fast_apply import Applier
from etude.inference.vllm.prompt_parsing import ApplyPrompt, parse_prompt
from etude.renderers import renderer_for

MODEL = Path(__file__).parents[2] / "models" / "nano"
FILE = "import os\n\n\ndef size():\n    return 3\n"
SKETCH = "# ... existing code ...\ndef size():\n    return 4\n"


@pytest.mark.parametrize(
    "text", [FILE, FILE.replace("\n", "\r\n"), "\ufeff" + FILE, FILE[:-1], "", "\n\n" + FILE, "if a < b:\n\tpass\n"]
)
@pytest.mark.parametrize("dialect", [True, False])
def test_what_our_prompts_ask_for(text, dialect):
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    applier = Applier(tokenizer, renderer_for(MODEL) if dialect else None)
    sketch = SKETCH if "size" in text else "# ... existing code ...\nx = 1\n"
    request, close = applier.request(Edit(text, sketch, "Do it."), 4096)
    prompt = tokenizer.decode(request.ids, skip_special_tokens=False)
    assert parse_prompt(prompt) == ApplyPrompt(text, sketch, "<updated-code>\n", close)
    assert prompt.endswith("<updated-code>\n")


def test_tags_inside_the_file_give_all_a_suffix():
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    file = FILE + 'TAGS = "<code>\\n</code>\\n<update>\\n</update>"\n'
    request, close = Applier(tokenizer, None).request(Edit(file, SKETCH), 4096)
    parsed = parse_prompt(tokenizer.decode(request.ids, skip_special_tokens=False))
    assert parsed is not None
    assert (parsed.code, parsed.update, parsed.close) == (file, SKETCH, close)
    assert close != "</updated-code>"


def test_the_last_edit_of_a_conversation_counts():
    one = "<code>\na = 1\n</code>\n<update>\na = 2\n</update>\n"
    other = "<code>b = 1\n</code>\n\n<update>b = 2\n</update>\n"
    assert parse_prompt(one + "<updated-code>\na = 2\n</updated-code>\n" + other) == ApplyPrompt(
        "b = 1\n", "b = 2\n", "<updated-code>\n", "</updated-code>"
    )


def test_of_fenced_blocks_the_longest_is_the_file_and_one_with_a_marker_the_sketch():
    prompt = f"Apply\n```python\n{SKETCH}```\nto\n```python\n{FILE * 4}```\nand run\n```\nls\n```\n"
    assert parse_prompt(prompt) == ApplyPrompt(FILE * 4, SKETCH, "```python\n", "```")
    nested = f"~~~md\n```\ncode\n```\n{FILE}~~~\n"
    assert parse_prompt(nested) == ApplyPrompt(f"```\ncode\n```\n{FILE}", "", "~~~md\n", "~~~")


@pytest.mark.parametrize(
    "prompt", ["", "hello", "```python\nnever closed\n", "<update>\nx\n</update>", "<code>\nx\n</code>\n<update>\nopen"]
)
def test_other_prompts_ask_for_nothing(prompt):
    assert parse_prompt(prompt) is None
