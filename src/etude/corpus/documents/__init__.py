"""Documents to train on, of own repositories, packages, folders and replay data: `etude corpus build`.

    sources ──> read ──> copies ──> rows ──> parts ──> train/, held_out/
    (files)     (texts,  (the best  (seal,   (one      card.md, corpus.json
                 rules,   copy,      syntax,  order)
                 finger-  groups in  suites,
                 prints)  import     fill in
                          order)     the middle)

    structs         what passes from one step to the next
    sources, texts  lists and reads files; languages and rules
    read            first pass: documents and their fingerprints
    copies, imports second pass: copies, import order, groups
    rows, seal, suites  third pass: no secrets, no pieces of suites, rows
    parts           last pass: shuffled parts
    work, build, card   workers and resuming; the whole; the data card

Another source of rows is a branch in `sources` and `read` that yields documents, or conversations: all of them pass
`seal` before they become rows. Tokens, packing and weights are the matter of training, so a corpus serves every model.
"""

from etude.corpus.documents.build import build_documents
from etude.corpus.documents.sources import contents, corpus_sources, listed
from etude.corpus.documents.structs import CorpusSource
