"""Tables of applied edits, from repositories: what people changed, and synthetic changes where history is short.

Public: `build.build`, behind `etude tasks fast-apply`. `make` makes single examples, `rename_augmentation` gives
examples other names during training.
"""
