"""Edits as agents write them: a sketch (a lazy edit snippet) of what changes, applied to a file.

The room imports `code` and the foundations alone. Public: `edit.Edit` (a checked edit and its deterministic merge),
`merge`, `sketch` (sketches drawn for a known edit), `formats` (how a model is asked and answers), `grade` and `judge`
(how right an answer is), `examples` (tables of edits).
"""
