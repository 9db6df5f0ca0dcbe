"""Makes tables of applied edits from repositories: edits by people, and synthetic edits where history is short.

Public: `build.build`, behind `etude tasks fast-apply`. `make` makes single examples, `rename_augmentation` gives
examples other names during training.
"""

from etude.corpus.edits.build import build_edit_table
from etude.corpus.edits.card import bin_name
from etude.corpus.edits.make import edit_with_sketch
from etude.corpus.edits.repositories import Repository
