"""Training text for the stages before reinforcement learning: documents, conversations, retrieval questions, edits.

The room imports `edits`, `code` and the foundations, never torch. `documents` makes corpora, `edits.build` tables of
applied edits; `dialect` has the special tokens of the bundled models.
"""

from etude.corpus.chats import (
    Chat,
    LearnedRow,
    RefusedRow,
    RowEncoders,
    chat_files,
    encode_chat,
    middle_of,
)
from etude.corpus.corpus_folder import check_corpus, is_corpus
from etude.corpus.dedup import bands_of
from etude.corpus.dialect import SPECIAL_IDS
from etude.corpus.filters import FunctionText
from etude.corpus.packing import Encoded, Rows, best_fit, join_rows, load_rows, pack_rows, save_rows, shuffle_rows
from etude.corpus.retrieval import (
    RETRIEVAL_HELD_OUT,
    RETRIEVAL_KINDS,
    RetrievalOptions,
    RetrievalSample,
    folder_functions,
    package_functions,
    retrieval_samples,
)
from etude.corpus.sources import fetch_source
from etude.corpus.string_edits import StringEdit, edit_between

PUBLIC = ("", "documents", "edits", "sessions", "streams", "windows")
