from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from etude.corpus import fim, packing


def test_cut_joins_back_to_the_text() -> None:
    text = "def f(x):\n    y = x + 1\n    return y\n"
    rng = random.Random(0)
    for _ in range(300):
        prefix, middle, suffix = fim.split(text, rng)
        assert prefix + middle + suffix == text
        assert middle
    with pytest.raises(ValueError, match="empty"):
        fim.split("", rng)


def _document(start: int, size: int, labelled: int = 1) -> packing.Encoded:
    return np.arange(start, start + size, dtype=np.uint16), np.full(size, labelled, dtype=np.uint8)


def test_every_token_is_packed_once_and_short_documents_are_never_cut() -> None:
    rng = random.Random(1)
    documents = [_document(100 * i + 10, rng.randint(1, 40)) for i in range(60)]
    rows = packing.pack_rows(documents, 64, pad=1, separator=0, label_separator=True)
    assert sorted(rows.ids[rows.ids >= 10].tolist()) == sorted(t for ids, _ in documents for t in ids.tolist())
    for ids, _ in documents:
        row, at = np.argwhere(rows.ids == ids[0])[0]
        assert rows.ids[row, at : at + len(ids)].tolist() == ids.tolist()
    assert (rows.ids == 1).mean() < 0.1
    assert not rows.mask[rows.ids == 1].any()
    assert rows.mask[rows.ids == 0].all()


def test_long_document_is_cut_and_separator_label_is_as_asked() -> None:
    rows = packing.pack_rows([_document(10, 150)], 64, pad=1, separator=0, label_separator=False)
    assert rows.ids.shape == (3, 64)
    assert rows.ids.reshape(-1)[:151].tolist() == [*range(10, 160), 0]
    assert rows.labelled == 150
    exact = packing.pack_rows([_document(10, 64)], 64, pad=1, separator=0, label_separator=False)
    assert exact.ids.tolist() == [list(range(10, 74))]


def test_rows_survive_saving_and_shuffling(tmp_path: Path) -> None:
    rows = packing.pack_rows([_document(100 * i, 30) for i in range(8)], 32, pad=1, separator=0, label_separator=True)
    packing.save_rows(rows, tmp_path / "rows.safetensors")
    assert np.array_equal(packing.load_rows(tmp_path / "rows.safetensors").ids, rows.ids)
    mixed = packing.shuffle_rows(rows, 3)
    assert not np.array_equal(mixed.ids, rows.ids)
    assert sorted(map(tuple, mixed.ids.tolist())) == sorted(map(tuple, rows.ids.tolist()))
    with pytest.raises(ValueError, match="no documents"):
        packing.pack_rows([], 32, pad=1, separator=0, label_separator=True)
