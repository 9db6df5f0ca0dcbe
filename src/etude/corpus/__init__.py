"""Training text for the stages before reinforcement learning: code, repair episodes, retrieval questions, edits.

The room imports `edits`, `code` and the foundations, never torch. `build` makes rows of tokens from functions of pinned
packages, `edits.build` tables of applied edits; `dialect` is that of the nano model.
"""

from etude.corpus.chats import (
    Chat,
    LearnedRow,
    RefusedRow,
    RowEncoders,
    chat_files,
    encode_chat,
    is_corpus,
    middle_of,
)
from etude.corpus.dedup import bands_of
from etude.corpus.dialect import SPECIAL_IDS, SPECIALS, TextPiece, special_piece
from etude.corpus.filters import FunctionText
from etude.corpus.packing import Encoded, Rows, best_fit, join_rows, load_rows, pack_rows, save_rows, shuffle_rows
from etude.corpus.repair_episodes import OPERATOR_WEIGHTS, StringEdit, edit_between
from etude.corpus.retrieval import (
    RETRIEVAL_HELD_OUT,
    RETRIEVAL_KINDS,
    RetrievalOptions,
    RetrievalSample,
    folder_functions,
    retrieval_samples,
)
from etude.corpus.sources import fetch_source

PUBLIC = ("", "build", "dialect", "documents", "edits", "sessions", "streams", "vocabulary", "windows")
