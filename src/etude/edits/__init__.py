"""Edits in the form in which agents write them: a sketch (a lazy edit snippet) of the changes, applied to a file.

The room imports `code` and the foundations alone. Public: `edit.Edit` (a checked edit and its deterministic merge),
`merge`, `sketch` (sketches drawn for a known edit), `formats` (prompts and answers of a model), `grades` and `judge`
(whether an answer is right), `examples` (tables of edits).
"""

from etude.edits.edit import DoesNotFit, Edit, NotClosed, read_text

PUBLIC = ("", "examples", "formats", "grades", "judge", "merge", "sketch")
