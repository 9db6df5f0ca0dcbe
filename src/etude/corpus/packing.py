"""Packs documents of any length into rows of fixed length, best fit first, so that short documents are never cut."""

import bisect
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

Encoded = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Rows:
    """Packed training rows: `ids` uint32 [R, T]; `mask` uint8 [R, T] with 1 where the token is a target; and `starts`
    uint8 [R, T] with 1 at the first token of every document, and 2 at the first token of the padding."""

    ids: np.ndarray
    mask: np.ndarray
    starts: np.ndarray

    @property
    def tokens(self) -> int:
        """The number of tokens in all rows, padding included."""
        return int(self.ids.size)

    @property
    def labelled(self) -> int:
        """The number of tokens that are targets."""
        return int(self.mask.sum())


Piece = tuple[int, int, int]
"""A document's number, its first token in a row and the number of its tokens there, the separator included."""


def pack_rows(
    documents: Sequence[Encoded], length: int, *, pad: int, separator: int | None, label_separator: bool = False
) -> Rows:
    """The rows of `pack_pieces`."""
    return pack_pieces(documents, length, pad=pad, separator=separator, label_separator=label_separator)[0]


def pack_pieces(
    documents: Sequence[Encoded], length: int, *, pad: int, separator: int | None, label_separator: bool = False
) -> tuple[Rows, list[list[Piece]]]:
    """Pack documents into rows of `length` tokens; also the pieces of each row, in order. The separator, if there is
    one, follows each document where the row has room. The longest document goes first, into the fullest row with room
    for it. A document longer than a row is cut into rows. The rows are in order of the length of their first document;
    shuffle them before training. Raises ValueError without documents."""
    if not documents:
        raise ValueError("there are no documents to pack")
    cut: list[Encoded] = []
    pieces: list[Piece] = []
    for number, (ids, mask) in enumerate(documents):
        end_ids, end_mask = ids, mask
        if separator is not None and len(ids) != length:  # else it fits without its separator
            end_ids, end_mask = np.append(ids, separator), np.append(mask, int(label_separator))
        for first in range(0, len(end_ids), length):
            cut.append((end_ids[first : first + length], end_mask[first : first + length]))
            pieces.append((number, first, len(cut[-1][0])))
    rows = best_fit([len(ids) for ids, _ in cut], length)
    ids_RT = np.full((len(rows), length), pad, dtype=np.uint32)
    mask_RT, starts_RT = np.zeros((len(rows), length), dtype=np.uint8), np.zeros((len(rows), length), dtype=np.uint8)
    for row, members in enumerate(rows):
        at = 0
        for index in members:
            ids, mask = cut[index]
            ids_RT[row, at : at + len(ids)] = ids
            mask_RT[row, at : at + len(ids)] = mask
            starts_RT[row, at] = 1
            at += len(ids)
        starts_RT[row, at : at + 1] = 2
    return Rows(ids_RT, mask_RT, starts_RT), [[pieces[index] for index in members] for members in rows]


def best_fit(sizes: Sequence[int], length: int) -> list[list[int]]:
    """Groups of indices whose sizes add up to at most `length`: the longest first, into the fullest group with room."""
    room: list[tuple[int, int]] = []  # (free tokens, row), sorted
    rows: list[list[int]] = []
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        size = sizes[index]
        place = bisect.bisect_left(room, (size, -1))
        if place == len(room):
            rows.append([index])
            bisect.insort(room, (length - size, len(rows) - 1))
        else:
            free, row = room.pop(place)
            rows[row].append(index)
            bisect.insort(room, (free - size, row))
    return rows


def shuffle_rows(rows: Rows, seed: int) -> Rows:
    """The same rows in a random order."""
    order = np.random.default_rng(seed).permutation(len(rows.ids))
    return Rows(rows.ids[order], rows.mask[order], rows.starts[order])


def join_rows(parts: Sequence[Rows]) -> Rows:
    """The rows of all parts, one part after the other; all have the same length."""
    return Rows(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("ids", "mask", "starts")))


def save_rows(rows: Rows, path: Path) -> None:
    """Write the rows as a safetensors file, atomically."""
    from safetensors.numpy import save_file

    partial = path.with_name(path.name + ".incomplete")
    save_file({"ids": rows.ids, "mask": rows.mask, "starts": rows.starts}, str(partial))
    os.replace(partial, path)


def load_rows(path: Path) -> Rows:
    """The rows of a file that `save_rows` wrote."""
    from safetensors.numpy import load_file

    tensors = load_file(str(path))
    return Rows(tensors["ids"], tensors["mask"], tensors["starts"])
