"""An edit from a user: a text file and a sketch, with size limits and the deterministic merge. No torch."""

from dataclasses import dataclass
from pathlib import Path

from etude.code import language_of, lines_of
from etude.edits.merge import Merge, merge
from etude.edits.sketch_blocks import NoPlace, is_marker
from etude.errors import UserError

MAX_BYTES = 1 << 20
MAX_LINES = 10_000
_MAX_SKETCH = 1 << 18
_MAX_MARKERS = 200  # each takes memory for every line of the file
_MAX_WORK = 40_000_000  # lines of the file times lines of the sketch: about ten seconds


class DoesNotFit(UserError):
    """The edit is too large for a model's context."""


class NotClosed(UserError):
    """The model did not end its answer."""


@dataclass(frozen=True)
class Edit:
    """A file's text, the sketch of an edit, an instruction that describes the edit, and the file's path. The last two
    may be empty; the path's ending says the language."""

    text: str
    sketch: str
    instruction: str = ""
    path: str = ""

    def merged(self) -> str:
        """The text that the sketch means. Raises UserError as `draft` does, and for a sketch that may mean another
        text as well: an apply model decides between them."""
        merge = self.draft()
        if merge.doubt:
            raise UserError(merge.doubt)
        return merge.text

    def draft(self) -> Merge:
        """The deterministic merge. Raises UserError for a text or a sketch that is too large, and for a sketch without
        a place."""
        lines = len(lines_of(self.text))
        size = len(self.text.encode("utf-8", "surrogatepass"))
        if lines > MAX_LINES or size > MAX_BYTES:
            raise UserError(
                f"the file has {lines} lines and {size} bytes; an edit is applied to at most {MAX_LINES} lines and "
                f"{MAX_BYTES} bytes: split the file"
            )
        if len(self.sketch) > _MAX_SKETCH:
            raise UserError(f"the sketch has {len(self.sketch)} characters; give at most {_MAX_SKETCH}")
        shown = len(lines_of(self.sketch))
        markers = sum(map(is_marker, lines_of(self.sketch)))
        if markers > _MAX_MARKERS:
            raise UserError(f"the sketch has {markers} markers; give at most {_MAX_MARKERS}")
        if lines * shown > _MAX_WORK:
            raise UserError(f"the sketch has {shown} lines; for a file of {lines} give at most {_MAX_WORK // lines}")
        try:
            return merge(self.text, self.sketch, language_of(self.path))
        except NoPlace as e:
            raise UserError(f"{e}: quote a line of the file next to the change") from None


def read_text(path: Path) -> str:
    """The text of a file, with its line ends. Raises UserError unless it is a UTF-8 text file within the size limit."""
    try:
        with path.open("rb") as f:
            data = f.read(MAX_BYTES + 1)
    except OSError as e:
        raise UserError(f"{path} cannot be read ({e.strerror}): give the path of a text file") from None
    if len(data) > MAX_BYTES:
        raise UserError(f"{path} has more than {MAX_BYTES} bytes: split the file")
    if b"\0" in data:
        raise UserError(f"{path} is a binary file: only text can be edited")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as e:
        raise UserError(f"{path} is not UTF-8 (byte {e.start}): convert it first, e.g. with iconv") from None
