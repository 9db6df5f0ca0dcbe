"""Training text for the stages before reinforcement learning: code, repair episodes, retrieval questions, edits.

The room imports `edits`, `code` and the foundations, never torch. `build` makes rows of tokens from functions of pinned
packages, `edits.build` tables of applied edits; `dialect` and `tokenizer` are those of the nano model.
"""

from etude.corpus.dedup import bands_of
from etude.corpus.filters import FunctionText
from etude.corpus.repair_episodes import WEIGHTS, StringEdit, edit_between

PUBLIC = (
    "",
    "build",
    "chats",
    "dialect",
    "edits",
    "edits.build",
    "edits.make",
    "edits.rename_augmentation",
    "foreign",
    "packing",
    "retrieval",
    "sources",
    "tokenizer",
    "vocabulary",
)
