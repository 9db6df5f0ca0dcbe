"""Edits in the form in which agents write them: a sketch (a lazy edit snippet) of the changes, applied to a file.

The room imports `code` and the foundations alone. `Edit` is a checked edit and its deterministic merge: `sketch_blocks`
reads the sketch, `indentation` and `placement` find the places of its blocks, `merge` writes them. `sketch` draws
sketches for a known edit, `formats` has the prompt of a model, `grades` and `judge` decide whether an
answer is right, `examples` reads tables of edits.
"""

from etude.edits.edit import DoesNotFit, Edit, NotClosed, read_text
from etude.edits.examples import BINS, Example, load_examples, weighted_examples, write_examples
from etude.edits.formats import EditPrompt, edit_prompt
from etude.edits.grades import EditGrade, grade_edit, lines_changed_outside
from etude.edits.sketch import Sketch, draw_no_op, draw_sketch, edit_hunks
from etude.edits.sketch_blocks import is_marker

PUBLIC = ("", "judge")
