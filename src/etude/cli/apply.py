"""`etude apply`: apply a sketch to a file, show the difference, and write the file at once or not at all."""

from __future__ import annotations

import difflib
import os
import sys
import tempfile
from pathlib import Path

from etude.config import EngineConfig
from etude.edits.edit import Edit, read_text
from etude.errors import UserError

_SECONDS = 600.0
_COLOURS = {"+": "\033[32m", "-": "\033[31m", "@": "\033[36m"}


def apply(
    path: Path,
    sketch: str | None,
    sketch_file: Path | None,
    *,
    instruction: str,
    model: Path | None,
    check: bool,
    engine: EngineConfig = EngineConfig(),
) -> int:
    """Edit `path`; `model` None merges without a model, `check` only prints. Raises UserError, the file untouched."""
    if (sketch is None) == (sketch_file is None):
        raise UserError("give the sketch of the edit with --edit TEXT or --edit-file FILE, one of the two")
    if sketch is None:
        assert sketch_file is not None
        sketch = read_text(sketch_file)
    before = read_text(path)
    edit = Edit(before, sketch, instruction)
    after = edit.merged() if model is None else _rewritten(edit, model, engine)
    show(path, before, after)
    if not check and after != before:
        write(path, before, after)
    return 0


def _rewritten(edit: Edit, folder: Path, config: EngineConfig) -> str:
    """What the model makes of the edit."""
    from etude.inference.engine.engine import load_engine
    from etude.inference.server.apply import Applier
    from etude.renderers import renderer_for
    from etude.renderers.base import load_tokenizer

    edit.merged()  # what is wrong with the sketch is known before a model is loaded
    engine = load_engine(folder, config.model_copy(update={"max_batch": 1}))
    has_chat = (folder / "chat_template.jinja").is_file()
    applier = Applier(load_tokenizer(folder), renderer_for(folder) if has_chat else None)
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
    """Print the unified difference, in colour on a terminal."""
    if before == after:
        print(f"{path}: nothing to change")
        return
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    sides = (text.splitlines() for text in (before, after))
    for line in difflib.unified_diff(*sides, f"a/{path.name}", f"b/{path.name}", lineterm=""):
        code = _COLOURS.get(line[:1], "") if colour else ""
        print(f"{code}{line}\033[0m" if code else line)
    if before.splitlines() == after.splitlines():
        print(f"{path}: only line ends change")


def write(path: Path, before: str, after: str) -> None:
    """Replace the file in one step, its mode kept. Raises UserError if it has changed since it was read."""
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
