"""Training text for the stages before reinforcement learning: code, repair episodes, retrieval questions, edits.

The room imports `edits`, `code` and the foundations, never torch. Public: `build` (functions of pinned packages, and
rows of tokens from them), `episodes`, `retrieval`, `packing`, `dialect` and `tokenizer` (of the nano model), and
`edits.build` (tables of applied edits).
"""
