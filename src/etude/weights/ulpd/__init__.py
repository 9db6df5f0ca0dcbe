"""ULPD/1: a codec of lossless deltas between versions of a model's weights (docs/weights.md).

    chunk_grid       names, types, shapes, and the grid of chunks
    codec            records of changed chunks, folds over versions, objects of records: encode, apply, pack, unpack
    profiles         encodings of the changes of a chunk; streams: the code of numbers
    digest           digests of tensors on their device
    kernels          the loops over elements on the host, and the choice of triton_kernels for a tensor on a GPU

Stands alone: numpy, numba, torch, blake3, xxhash and zstandard, nothing else of etude.
"""

# pyright: reportUnusedImport=false
from etude.weights.ulpd.chunk_grid import Schema
from etude.weights.ulpd.digest import digest_text, narrow_lossless, weights_digest
