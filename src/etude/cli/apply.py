"""`etude apply FILE`: applies a sketched edit to a file, prints the difference, and replaces the file in one step."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import tempfile
from pathlib import Path

from etude.cli.flags import add_flags, from_flags
from etude.code import shown_lines
from etude.config import EngineConfig
from etude.edits import Edit, read_text
from etude.errors import UserError
from etude.weights import model_folder

_SECONDS = 600.0  # for the model's answer
_COLOURS = {"+": "\033[32m", "-": "\033[31m", "@": "\033[36m"}


def add(parser: argparse.ArgumentParser) -> None:
    """Flags of `etude apply`."""
    parser.add_argument("file", type=Path, help="UTF-8 text file; replaced in one step or not at all")
    parser.add_argument("--edit", metavar="TEXT", help="the lines that change; `# ... existing code ...` for the rest")
    parser.add_argument("--edit-file", type=Path, metavar="FILE", help="the same from a file")
    parser.add_argument("--instruction", default="", help="what the edit is about, for the model")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--model", help="HF or run folder of an apply model, or the name of a bundled one such as nano-apply"
    )
    which.add_argument("--no-model", action="store_true", help="only the deterministic merge (the default)")
    parser.add_argument("--check", action="store_true", help="print the difference and write nothing")
    add_flags(parser.add_argument_group("engine", "with --model"), EngineConfig, ("device", "dtype"))


def run(arguments: argparse.Namespace, rest: list[str]) -> None:
    """Edits the file. Raises UserError with the file untouched."""
    path, sketch = arguments.file, arguments.edit
    if (sketch is None) == (arguments.edit_file is None):
        raise UserError("give the sketch of the edit with --edit TEXT or --edit-file FILE, one of the two")
    if sketch is None:
        sketch = read_text(arguments.edit_file)
    elif sketch.encode(errors="ignore").decode() != sketch:
        raise UserError("the text of --edit is not UTF-8: give it with --edit-file, in UTF-8")
    before = read_text(path)
    edit = Edit(before, sketch, arguments.instruction, path.name)
    if arguments.model is None:
        after = edit.merged()
    else:
        edit.draft()  # an error in the sketch is reported before a model is loaded
        after = _rewritten(edit, model_folder(arguments.model), from_flags(arguments, EngineConfig))
    show(path, before, after)
    if not arguments.check and after != before:
        write(path, before, after)


def _rewritten(edit: Edit, folder: Path, config: EngineConfig) -> str:
    """The edited file as the model writes it."""
    from etude.inference.engine.loading import load_engine
    from etude.inference.server.fast_apply import Applier
    from etude.renderers import load_tokenizer, renderer_for

    engine = load_engine(folder, config.model_copy(update={"max_batch": 1}))
    has_chat = (folder / "chat_template.jinja").is_file()
    applier = Applier(load_tokenizer(folder), renderer_for(folder, tools=False) if has_chat else None)
    request, close = applier.request(edit, engine.max_length)
    answer = applier.collector(close)
    engine.start()
    try:
        sequence = engine.submit(request, answer)
        answer.watch(sequence)
        sequence.future.result(_SECONDS)
    except TimeoutError:
        raise UserError(f"the model did not end within {_SECONDS:.0f} seconds: use a smaller one") from None
    finally:
        engine.close()
    return answer.text()


def show(path: Path, before: str, after: str) -> None:
    """Prints the unified difference, in colour on a terminal."""
    if before == after:
        print(f"{path}: nothing to change")
        return
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    names = f"a/{path.name}", f"b/{path.name}"
    for line in difflib.unified_diff(shown_lines(before), shown_lines(after), *names, lineterm=""):
        code = _COLOURS.get(line[:1], "") if colour else ""
        print(f"{code}{line}\033[0m" if code else line)
    if shown_lines(before) == shown_lines(after):
        print(f"{path}: only line ends change")


def write(path: Path, before: str, after: str) -> None:
    """Replaces the file in one step and keeps its mode. Raises UserError if the file has changed since it was read."""
    target = path.resolve()  # a link stays a link
    temporary = None
    try:
        mode = target.stat().st_mode
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as f:
            temporary = Path(f.name)
            f.write(after.encode())
            f.flush()
            os.fsync(f.fileno())
        temporary.chmod(mode & 0o7777)
        if target.read_bytes() != before.encode():
            raise UserError(f"{path} changed while the edit was made: run the command again")
        temporary.replace(target)
        temporary = None
    except OSError as e:
        raise UserError(f"{path} cannot be written ({e.strerror}): check the permissions of its folder") from None
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
