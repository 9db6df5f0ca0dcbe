"""`etude apply`: the file is replaced at once or not at all, and every bad input is one sentence with exit code 2."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from etude.cli import apply, main
from etude.edits.edit import MAX_BYTES, MAX_LINES, Edit
from etude.errors import UserError

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs/fast-apply.md").read_text()
FILE = (
    "import os\n\n\nclass Stack:\n    def pop(self):\n        return self.items[-1]\n\n"
    "    def size(self):\n        return 3\n"
)
SKETCH = (
    "import re\nimport os\n# ... existing code ...\n    def pop(self):\n        return self.items.pop()\n"
    "# ... existing code ...\n"
)
RESULT = FILE.replace("import os", "import re\nimport os").replace("items[-1]", "items.pop()")


def run(*arguments):
    """Exit code of `etude apply`."""
    with pytest.raises(SystemExit) as end:
        main.main(["apply", *map(str, arguments)])
    return end.value.code


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "stack.py"
    path.write_text(FILE)
    return path


def test_the_documented_commands(file, tmp_path, capsys):
    (tmp_path / "sketch.txt").write_text(re.search(r"```python\n(.*?)```", DOCS, re.S)[1])
    lines = [line for line in DOCS.splitlines() if line.startswith("etude apply ")]
    assert len(lines) == 2
    for line, written in zip(lines, (False, True), strict=True):
        words = line.replace("FILE", str(file)).replace("SKETCH", str(tmp_path / "sketch.txt"))
        assert run(*shlex.split(words)[2:]) == 0
        shown = capsys.readouterr().out
        assert "+        return self.items.pop()" in shown
        assert "\033" not in shown  # no terminal, no colours
        assert file.read_text() == (RESULT if written else FILE)


def test_mode_and_link_stay_and_nothing_else_is_left(file, tmp_path, capsys):
    file.chmod(0o750)
    link = tmp_path / "link.py"
    link.symlink_to(file)
    assert run(link, "--edit", SKETCH, "--no-model") == 0
    assert file.read_text() == RESULT
    assert file.stat().st_mode & 0o7777 == 0o750
    assert link.is_symlink()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.py", "stack.py"]
    before = file.stat().st_mtime_ns
    assert run(link, "--edit", "# ...\n    def size(self):\n# ...\n", "--no-model") == 0
    assert "nothing to change" in capsys.readouterr().out
    assert file.stat().st_mtime_ns == before


def test_colours_on_a_terminal(file, capsys, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    apply.show(file, "a\n", "b\n")
    shown = capsys.readouterr().out
    assert "\033[31m-a\033[0m" in shown
    assert "\033[32m+b\033[0m" in shown


@pytest.mark.parametrize(
    ("data", "arguments", "sentence"),
    [
        (b"a\0b", ["--edit", "x"], "is a binary file"),
        ("é".encode("latin-1"), ["--edit", "x"], "is not UTF-8"),
        (b"a\n" * (MAX_LINES + 1), ["--edit", "a"], "split the file"),
        (b"a" * (MAX_BYTES + 1), ["--edit", "a"], "split the file"),
        (b"a = 1\n", ["--edit", ""], "the sketch is empty"),
        (b"a = 1\n", ["--edit", "# ...\nzebra(17)\n# ...\n"], "quote a line of the file"),
        (b"a = 1\n", [], "one of the two"),
        (b"a = 1\n", ["--edit", "a = 2", "--edit-file", "x"], "one of the two"),
        (b"a = 1\n", ["--edit", "a = 1\n\udcff\n"], "not UTF-8"),
        (b"a = 1\n", ["--edit-file", "nowhere.txt"], "cannot be read"),
        (b"a = 1\n", ["--edit", "a = 2\n", "--model", "nowhere"], "nowhere is not a folder"),
        (None, ["--edit", "x"], "cannot be read"),
    ],
)
def test_bad_input_is_one_sentence_and_the_file_untouched(tmp_path, capsys, data, arguments, sentence):
    path = tmp_path / "file.py"
    if data is not None:
        path.write_bytes(data)
    extra = [] if "--model" in arguments else ["--no-model"]
    assert run(path, *arguments, *extra) == 2
    told = capsys.readouterr()
    assert sentence in told.err
    assert told.err.count("\n") == 1
    assert told.out == ""
    if data is not None:
        assert path.read_bytes() == data
        assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_changed_meanwhile_is_not_overwritten(file):
    with pytest.raises(UserError, match="changed while the edit was made"):
        apply.write(file, "something else\n", "new\n")
    assert file.read_text() == FILE
    assert list(file.parent.iterdir()) == [file]


def test_the_bundled_model_says_that_it_is_no_apply_model(file, capsys):
    assert run(file, "--edit", SKETCH, "--model", ROOT / "models/nano") == 2
    assert "it is no apply model" in capsys.readouterr().err
    assert file.read_text() == FILE


def test_without_a_model_named_the_edit_is_merged(file, capsys):
    assert run(file, "--edit", SKETCH) == 0
    assert file.read_text() == RESULT


def test_an_edit_too_large_for_the_bundled_apply_model_is_refused(file, capsys):
    text = FILE + "".join(f"\n\ndef f{i}():\n    return {i}\n" for i in range(200))
    file.write_text(text)
    assert run(file, "--edit", SKETCH, "--model", ROOT / "models/nano-apply") == 2
    assert "the model has a context of 512" in capsys.readouterr().err
    assert file.read_text() == text


def test_a_request_brings_prompt_and_drafts_that_tokenise_alike():
    from tokenizers import Tokenizer

    from etude.inference.server.fast_apply import Applier
    from etude.renderers import renderer_for

    folder = ROOT / "models/nano"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    applier = Applier(tokenizer, renderer_for(folder))
    request, close = applier.request(Edit(FILE, SKETCH, "pop"), 4096)
    assert tokenizer.decode(request.ids, skip_special_tokens=False).endswith("<updated-code>\n")
    texts = {source.name: tokenizer.decode(source.ids.tolist()) for source in request.sources}
    assert texts == {"merge": RESULT + close, "file": FILE + close, "sketch": SKETCH}
    answer = applier.collector(close)
    for token in [*request.sources[0].ids.tolist(), 40, 41]:
        answer(token, 0.0)
    assert answer.text() == RESULT
    tagged, close = applier.request(Edit(FILE + "x = '</code>'\n", SKETCH), 4096)
    assert re.fullmatch(r"</updated-code-[0-9a-f]{6}>", close)
    assert f"<code{close.removeprefix('</updated-code')}" in tokenizer.decode(tagged.ids, skip_special_tokens=False)
    with pytest.raises(UserError, match="context of 64"):
        applier.request(Edit(FILE, SKETCH), 64)


@pytest.mark.slow
def test_the_documented_benchmark():
    (line,) = [line for line in DOCS.splitlines() if line.startswith("etude bench ")]
    command = [sys.executable, "-m", "etude.cli.main", *shlex.split(line)[1:]]
    without_vllm = {name: value for name, value in os.environ.items() if name != "ETUDE_VLLM_PYTHON"}  # minutes more
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, env=without_vllm)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert all(result["checks"].values())
    assert result["absent"] == {"vllm/*": "ETUDE_VLLM_PYTHON names no Python with vLLM (docs/weights.md)"}
    names = {"large-small-edit/speedup", "large-small-edit/end-to-end", "large-small-edit/vs-tuned-lookup",
             "suite/speedup-median", "suite/speedup-p10", "fp32/mismatches", "unrelated-prediction/cost"}  # fmt: skip
    assert names <= {row["case"] for row in result["rows"]}


def test_training_text_is_what_the_model_is_asked_later():
    from tokenizers import Tokenizer

    from etude.edits.examples import Example
    from etude.inference.server.fast_apply import Applier
    from etude.renderers import renderer_for
    from etude.trainer.finetune.applied_edits import encode

    folder = ROOT / "models/nano"
    example = Example(
        id="", repository="", licence="", origin="files", path="", language="python", kind="synthetic", noise=(),
        merges=True, instruction="pop <|end|>", file=FILE, sketch=SKETCH, result=RESULT, lines=9, fraction=0.1,
    )  # fmt: skip
    ((ids, mask),) = encode([example], renderer_for(folder))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    applier = Applier(tokenizer, renderer_for(folder))
    request, close = applier.request(Edit(FILE, SKETCH, "pop <|end|>"), 4096)
    assert ids[mask == 0].tolist() == request.ids
    assert ids[mask > 0].tolist()[:-1] == applier.encode_answer(RESULT + close)
