"""Training text for the stages before reinforcement learning: code, repair episodes, retrieval questions, edits.

The room imports `edits`, `code` and the foundations, never torch. Public: `build` (functions of pinned packages, and
rows of tokens from them), `repair_episodes`, `retrieval`, `packing`, `dialect` and `tokenizer` (of the nano model),
and `edits.build` (tables of applied edits).
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
