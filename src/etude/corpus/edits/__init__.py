"""Makes tables of applied edits from repositories: edits by people, and synthetic edits where history is short.

`build_edit_table` is behind `etude tasks fast-apply`; `make` makes single examples.
"""

from etude.corpus.edits.build import build_edit_table
from etude.corpus.edits.card import bin_name
from etude.corpus.edits.make import edit_with_sketch
from etude.corpus.edits.repositories import Repository
