"""Tokenizers trained here, a chat template of our own, and policies that play a script."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from etude.protocol.wire import GenerateRequest
from etude.records import CodeTask, Focus, Generation
from etude.renderers.schemas import COMPACT_PARAMETERS
from etude.sandbox.base import ExecResult, NotFound, NotRegular, TestReport
from etude.sandbox.egress.policy import EgressRequest

TEXT = [Path(json.__file__).read_text(), Path(__file__).read_text(), "def function(x):\n    return x\n" * 20]

# In the manner of Qwen3: tool results are user messages, consecutive ones share one; old thoughts are dropped.
TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{% endif %}
{{- 'You can call these functions:\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{% endfor %}
{{- '\\n</tools>\\nTo call one, say\\n<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}
{{- '<|im_start|>user\\n' + m.content | trim + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}
{%- set said = m.content %}
{%- if '</think>' in said and loop.index0 < ns.last %}{% set said = said.split('</think>')[-1].lstrip() %}{% endif %}
{{- '<|im_start|>assistant\\n' + said }}
{%- for call in m.tool_calls or [] %}
{%- set f = call.function %}
{{- '\\n<tool_call>\\n{"name": "' + f.name + '", "arguments": ' + (f.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


def hermes_tokenizer() -> Tokenizer:
    """A byte-level BPE whose pattern merges line breaks with each other, as Qwen's does."""
    tokenizer = Tokenizer(models.BPE())
    pattern = Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    split = pre_tokenizers.Split(pattern, behavior="isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1200, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([*TEXT, TEMPLATE, "\n\n\n" * 50], trainer)
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in ADDED])
    return tokenizer


def write_model(folder: Path, tokenizer: Tokenizer, template: str | None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [tokenizer.token_to_id(SPECIAL[0])]}))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


Call = tuple[str, dict[str, object]]


class Speaker:
    """Says turns in the tokens of a dialect, as a model would."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.compact = self.tokenizer.token_to_id("<|call|>") is not None
        self.end = self.tokenizer.token_to_id("<|end|>" if self.compact else "<|im_end|>")

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def turn(self, *calls: Call, text: str = "", end: bool = True) -> list[int]:
        if self.compact:
            said = text + "".join(
                "<|call|>"
                + name
                + "".join(f"<|arg|>{arguments[key]}" for key in COMPACT_PARAMETERS.get(name, arguments))
                for name, arguments in calls
            )
        else:
            said = text + "".join(
                "\n<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"
                for name, arguments in calls
            )
        return self.encode(said) + [self.end] * end


class Scripted:
    """A policy that says the turns of a script, and keeps what it was asked."""

    def __init__(self, turns: Sequence[list[int]] | Callable[[int], list[int]]) -> None:
        self.turns = turns
        self.prompts: list[list[int]] = []
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest, *rest: Any) -> Generation:
        n = len(self.prompts)
        self.prompts.append(list(request.ids))
        self.requests.append(request)
        said = self.turns(n) if callable(self.turns) else self.turns[n]
        cut = said[: request.max_tokens]
        reason = "stop" if cut and cut[-1] in request.stop else "length"
        return Generation(ids=cut, logprobs=[-0.5] * len(cut), versions=[n] * len(cut), finish_reason=reason)


class MemoryBox:
    """A box that is only a value, for tests that need faults or no processes. `tests` decides the test report."""

    def __init__(self, files: dict[str, bytes], tests: Callable[[dict[str, bytes]], TestReport] | None = None) -> None:
        self.files = dict(files)
        self.start = dict(files)
        self.tests = tests
        self.fault: BaseException | None = None
        self.log: list[str] = []
        self.running = self.most = 0
        self.closed = False

    async def _enter(self, name: str) -> None:
        self.log.append(name)
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)  # a real box yields here
        self.running -= 1
        if self.fault is not None:
            raise self.fault

    async def read(self, path: str, max_bytes: int = 65536) -> bytes:
        await self._enter("read")
        if path not in self.files:
            raise NotFound(f"no such file: {path}")
        return self.files[path]

    async def write(self, path: str, data: bytes) -> None:
        await self._enter("write")
        self.files[path] = data

    async def list(self, path: str) -> list[str]:
        await self._enter("list")
        if path in self.files:
            raise NotRegular(f"not a folder: {path}")
        prefix = f"{path}/" if path else ""
        below = [name.removeprefix(prefix) for name in self.files if name.startswith(prefix)]
        if not below:
            raise NotFound(f"no such folder: {path}")
        return sorted({head + slash for head, slash, _ in (name.partition("/") for name in below)})

    async def delete(self, path: str) -> None:
        await self._enter("delete")
        del self.files[path]

    async def exec(self, line: str, timeout: float) -> ExecResult:
        await self._enter("exec")
        name, _, text = line.partition("=")
        self.files[name] = text.encode()
        return ExecResult(0, f"wrote {name}", 0, 0.0, False)

    async def run_tests(self, tests: Sequence[str], timeout: float) -> TestReport:
        await self._enter("run_tests")
        assert self.tests is not None
        return self.tests(self.files)

    async def changes(self, roots: Sequence[str] = ()) -> dict[str, bytes | None]:
        return {path: data for path, data in self.files.items() if self.start.get(path) != data}

    def requests(self) -> Sequence[EgressRequest] | None:
        return None

    async def close(self) -> None:
        self.closed = True


SOURCE = '''"""Shop."""


class Shop:
    def price(self, amount):
        """The price.

        >>> Shop().price(2)
        6
        """
        total = amount - 3
        return total
'''
PATH = "src/shop.py"
TEST = f"{PATH}::doctest:Shop.price"


def a_task() -> CodeTask:
    """Repair `Shop.price`: 3 is to be multiplied."""
    return CodeTask(
        id="shop-1",
        repository="shop-1.0",
        kind="mutation",
        operator="op_change",
        function=f"{PATH}::Shop.price",
        split="train",
        prompt=f"Fix `price` in {PATH}",
        focus=Focus(path=PATH, first_line=5, last_line=12),
        source_roots=("src",),
        changes={PATH: SOURCE},
        solution={PATH: SOURCE.replace("- 3", "* 3")},
        visible_tests=(TEST,),
        fail_to_pass=("tests/test_shop.py::test_price",),
        pass_to_pass=(),
        difficulty={},
        licence="MIT",
    )


def shop_tests(files: dict[str, bytes]) -> TestReport:
    """Passes when the source says `* 3`."""
    passed = b"* 3" in files[PATH]
    message = "expected 6, got\n -1 " + "x" * 200
    return TestReport({TEST: "passed" if passed else "failed"}, {} if passed else {TEST: message}, 0.0)


def a_box() -> MemoryBox:
    files = {PATH: SOURCE.encode(), "src/other.py": b"import shop\n", "README": b"Shop\n", ".git/x": b"Shop\n"}
    return MemoryBox(files, shop_tests)
