"""Checks of a model folder before hours of computing: what etude, stock engines and stock trainers would take wrong.

    findings          a finding, its edits, and the folder's files as they are read
    special_tokens    ends of turns, padding, beginnings, ids
    tensors           indices, layers, embeddings, numbers
    limits            context and defaults of sampling
    turns             the template's round trip, tools and thoughts
    folder_report, mending   all findings of a folder, those before training, and the mended copy

A fault is what goes wrong in an engine or a trainer; a note is what makers ship on purpose. No torch here.
"""

# pyright: reportUnusedImport=false
from etude.weights.preflight.folder_report import FolderReport, check_before_training, examine
from etude.weights.preflight.mending import repair
