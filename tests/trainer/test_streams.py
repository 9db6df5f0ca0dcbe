"""Rows that are read while they are trained on: order, shares, packing, provenance, places, refusals."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer

from etude.corpus.corpus_folder import corpus_parts
from etude.corpus.streams import STRETCH_BYTES
from etude.corpus.windows import RowWindow, StreamPlace, WindowMaker, held_out_documents
from etude.errors import UserError
from etude.trainer.finetune import data, provenance
from etude.trainer.finetune.config import MidtrainConfig, SftConfig
from etude.trainer.finetune.data import StreamData
from etude.trainer.finetune.provenance import WindowTrace
from tests.helpers.folders import big_tokenizer
from tests.helpers.speakers import TEMPLATE, write_model

PAD, LENGTH = 0, 64
WORDS = ("tree", "stone", "river", "cloud", "bread", "light")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model(tmp_path_factory.mktemp("model") / "model", big_tokenizer(1300), TEMPLATE)
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    return folder


def texts(path: Path, count: int, word: str = "tree", longest: int = 20, **more: Any) -> Path:
    """A file of `count` rows of a few words to `longest` words."""
    rng = np.random.default_rng(len(word))
    rows = [{"text": f"{word} {i} " * int(n), "id": f"{word}-{i}"} | more for i, n in
            enumerate(rng.integers(1, longest, count))]  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def stream(model: Path, files: dict[str, Any], stage: str = "midtrain", **trainer: Any) -> StreamData:
    kind = {"midtrain": MidtrainConfig, "sft": SftConfig}[stage]
    values = {"model": {"path": model}, "data": files, "trainer": {"length": LENGTH} | trainer, "seed": 3}
    return StreamData.of(kind.model_validate(values))


def maker(rows: StreamData, *, together: bool = True) -> WindowMaker:
    readers = rows.readers()
    return WindowMaker(readers, rows.length, PAD, rows.separator, rows.seed, together)


def windows(made: WindowMaker) -> Iterator[RowWindow]:
    while (window := made.window()) is not None:
        yield window


def traced(window: RowWindow) -> Iterator[tuple[int, tuple[str, str, int, int], int, int, int]]:
    """(row, document, first token, tokens, place in the row) of every piece."""
    trace = msgspec.json.decode(window.trace, type=WindowTrace)
    for row, pieces in enumerate(trace.rows):
        at = 0
        for number, first, count in zip(pieces[::3], pieces[1::3], pieces[2::3], strict=True):
            yield row, trace.documents[number], first, count, at
            at += count


def test_every_row_is_read_in_every_epoch_in_another_order_and_packed_with_little_waste(
    model: Path, tmp_path: Path
) -> None:
    files = [texts(tmp_path / f"{word}.jsonl", 1600, word, 40) for word in WORDS[:2]]
    rows = stream(model, {"files": files, "epochs": 2})
    assert len(rows.sources[0].stretches) >= 4
    assert all(part.last - part.first < STRETCH_BYTES + 4096 for part in rows.sources[0].stretches)
    made, orders, tokens, room = maker(rows), [list[str](), list[str]()], 0, 0
    every = list(windows(made))
    for window in every:
        trace = msgspec.json.decode(window.trace, type=WindowTrace)
        orders[window.place.cursors[0].epoch] += [name for name, *_ in trace.documents]
        tokens += sum(count for *_, count, _ in traced(window))
        room += len(window.packed.ids) // 4
    names = {f"{word}-{i}" for word in WORDS[:2] for i in range(1600)}
    assert [len(order) for order in orders] == [3200, 3200]
    assert [set(order) for order in orders] == [names, names]
    assert orders[0] != orders[1]
    assert 1 - tokens / room < 0.01
    assert (every[0].begin, every[-1].end) == (0, 1)
    assert all(a.end == b.begin and a.begin < a.end for a, b in pairwise(every))
    assert [window.place.row for window in every[1:]] == np.cumsum(
        [len(window.packed.rows().ids) for window in every[:-1]]
    ).tolist()


def test_a_row_holds_the_tokens_of_the_documents_that_its_trace_names(model: Path, tmp_path: Path) -> None:
    file = texts(tmp_path / "some.jsonl", 500, longest=60)  # some longer than a row
    lines = [json.loads(line)["text"] for line in file.read_text().splitlines()]
    rows, tokenizer = stream(model, {"files": [file]}), Tokenizer.from_file(str(model / "tokenizer.json"))
    labelled = pieces = 0
    of_document = Counter[str]()
    for window in windows(maker(rows)):
        packed = window.packed.rows()
        labelled += packed.labelled
        covered = np.zeros_like(packed.mask)
        for row, (name, _, _, line), first, count, at in traced(window):
            whole = [*tokenizer.encode(lines[line - 1], add_special_tokens=False).ids, rows.separator]
            assert packed.ids[row, at : at + count].tolist() == whole[first : first + count]
            covered[row, at : at + count] += 1
            pieces, of_document[name] = pieces + count, of_document[name] + count
        assert np.array_equal(covered, packed.mask)  # every token to learn is in one piece
    assert pieces == labelled
    for number, text in enumerate(lines):
        whole = len(tokenizer.encode(text, add_special_tokens=False).ids)
        assert of_document[f"tree-{number}"] in (whole, whole + 1)


def record(corpus: Path) -> None:
    parts, digest = corpus_parts(corpus)
    (corpus / "corpus.json").write_text(json.dumps({"parts": parts, "digest": digest}))


def mixture(tmp_path: Path) -> dict[str, Any]:
    corpus = tmp_path / "corpus"
    texts(corpus / "train" / "00000.jsonl", 1200, "own", 6, source="own")
    texts(corpus / "train" / "00001.jsonl", 1800, "replay", 6, source="replay")
    both = [*(corpus / "train").iterdir()]
    lines = [line for file in both for line in file.read_text().splitlines()]
    np.random.default_rng(0).shuffle(lines)
    for number, file in enumerate(both):
        file.write_text("\n".join(lines[number::2]) + "\n")
    texts(corpus / "held_out" / "00000.jsonl", 9, "held", source="own")
    record(corpus)
    other = texts(tmp_path / "other.jsonl", 700, "other", 6, source="other")
    weights = {"own": 3, "replay": 1}
    return {"sources": [{"path": corpus, "weight": 2, "weights": weights}, {"path": other, "weight": 1, "epochs": 9}]}


def test_sources_have_their_shares_of_the_tokens_all_the_time(model: Path, tmp_path: Path) -> None:
    rows = stream(model, mixture(tmp_path))
    wanted = {"own": 2 / 4 * 3 / 3, "replay": 2 / 3 / 4, "other": 1 / 3}
    made, tokens = maker(rows), Counter[str]()
    for window in windows(made):
        for _, (_, source, _, _), _, count, _ in traced(window):
            tokens[source] += count
        assert {name: tokens[name] / tokens.total() for name in wanted} == pytest.approx(wanted, abs=0.01)
    epochs = {reader.source.label.rpartition(":")[2]: reader.cursor.epoch for reader in made.readers}
    assert max(epochs.values()) == 4, "the run ends where the first source has been read as often as it may be"
    assert epochs["own"] == 4
    assert made.share == 1


def test_the_weight_of_a_source_that_ends_goes_to_the_others(model: Path, tmp_path: Path) -> None:
    one, two = texts(tmp_path / "one.jsonl", 500, "one", 6), texts(tmp_path / "two.jsonl", 4000, "two", 6)
    sources = [{"path": one, "weight": 9, "epochs": 2}, {"path": two, "weight": 1, "epochs": 1}]
    rows = stream(model, {"sources": sources}, tokens=10**9)
    every = list(windows(maker(rows, together=False)))
    notes = [note for window in every for note in window.notes]
    assert f"{one} has ended, read 2 times: its weight goes to the others" in notes
    traces = [msgspec.json.decode(window.trace, type=WindowTrace) for window in every]
    seen = Counter(name for trace in traces for name, *_ in trace.documents)
    assert set(seen.values()) == {1, 2}
    assert len(seen) == 4500
    assert every[-1].end == 1


def test_a_window_is_made_again_from_its_place(model: Path, tmp_path: Path) -> None:
    rows = stream(model, mixture(tmp_path))
    every = list(windows(maker(rows)))
    assert len(every) > 3
    for number in (1, len(every) - 1):
        stored = msgspec.json.decode(msgspec.json.encode(every[number].place), type=StreamPlace)
        again = maker(rows)
        again.place = stored
        for reader, cursor in zip(again.readers, stored.cursors, strict=True):
            reader.go_to(cursor, [])
        assert list(windows(again)) == every[number:]


MIDDLE = {"prefix": "def f(x):\n", "suffix": "    return y\n", "middle": "    y = x\n", "id": "m"}


def test_rows_of_fill_in_the_middle_have_the_tokens_of_the_model(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "fim.jsonl"
    long = {key: value * 99 for key, value in MIDDLE.items()}
    file.write_text("".join(json.dumps(row) + "\n" for row in (MIDDLE, {"text": "a"}, long, {"prefix": "a"})))
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    plain = {key: tokenizer.encode(MIDDLE[key], add_special_tokens=False).ids for key in ("prefix", "suffix", "middle")}
    special = [i for key, ids in plain.items() for i in (tokenizer.token_to_id(f"<|fim_{key}|>"), *ids)]
    text = tokenizer.encode(MIDDLE["prefix"] + MIDDLE["middle"] + MIDDLE["suffix"], add_special_tokens=False).ids
    for fim, wanted, refused in (("tokens", special, 2), ("text", text, 1), ("skip", None, 3)):
        [reader] = stream(model, {"files": [file], "fim": fim}).readers()
        documents = [one for _ in range(4) for one in reader.documents()]
        assert [one.ids.tolist() for one in documents if one.id == "m"] == ([wanted] if wanted else [])
        assert all(one.mask.all() for one in documents)
        assert reader.cursor.refused == refused
    [reader] = stream(model, {"files": [file], "fim": "tokens"}).readers()
    _ = [reader.documents() for _ in range(4)]
    assert "more than trainer.length = 64" in reader.named[0].why
    assert "`prefix`, `suffix` and `middle`" in reader.named[1].why


def test_a_tokenizer_without_tokens_for_fill_in_the_middle_is_refused_before_anything_is_trained(
    tmp_path: Path,
) -> None:
    tokenizer = json.loads(big_tokenizer(1300).to_str().replace("fim_", "other_"))
    bare = write_model(tmp_path / "bare", Tokenizer.from_str(json.dumps(tokenizer)), TEMPLATE)
    file = texts(tmp_path / "some.jsonl", 3)
    stream(bare, {"files": [file]})
    with file.open("a") as more:
        more.write(json.dumps(MIDDLE))
    with pytest.raises(UserError, match=r'no tokens for fill-in-the-middle: set data\.fim to "text" or "skip"'):
        stream(bare, {"files": [file]})
    for fim in ("text", "skip"):
        stream(bare, {"files": [file], "fim": fim})


def test_held_out_rows_are_the_first_of_each_path_and_bounded(model: Path, tmp_path: Path) -> None:
    one, two = (texts(tmp_path / f"{word}.jsonl", 2000, word) for word in WORDS[:2])
    values = mixture(tmp_path) | {"held_out": [one, two]}
    rows = stream(model, values)
    assert [Path(source.stretches[0].file.path).name for source in rows.held_out] == [one.name, two.name, "00000.jsonl"]
    readers = rows.readers(held_out=True)
    assert len(held_out_documents(readers, 9000)) == sum(reader.cursor.rows for reader in readers)
    assert [3000 <= reader.cursor.taken < 3300 for reader in readers[:2]] == [True, True]
    assert readers[2].ended


def test_wrong_sources_are_named(model: Path, tmp_path: Path) -> None:
    values = mixture(tmp_path)
    corpus, other = values["sources"][0]["path"], values["sources"][1]["path"]
    (tmp_path / "empty.jsonl").write_text("")
    for sources, why in (
        ([{"path": corpus, "weights": {"own": 1}}], "has rows of the source 'replay', which its weights do not name"),
        ([{"path": corpus, "weights": {"own": 1, "replay": 0, "mine": 2}}], "has no row of the source 'mine'"),
        ([{"path": other, "weights": {"own": 1}}], "is no corpus folder"),
        ([{"path": tmp_path / "empty.jsonl"}], "holds no row"),
        ([{"path": tmp_path / "none"}], "neither a file nor a folder"),
    ):
        with pytest.raises(UserError, match=why):
            stream(model, {"sources": sources})
    for wrong, why in (
        ({}, "either files or sources"),
        ({"files": [other], "sources": [{"path": other}]}, "either files or sources"),
        ({"sources": [{"path": other}], "epochs": 2}, "its own epochs"),
        ({"sources": [{"path": other}, {"path": other}]}, "a path twice"),
        ({"sources": [{"path": corpus, "weights": {"own": -1}}]}, "must not be negative"),
        ({"sources": [{"path": corpus, "weights": {"own": float("inf"), "replay": 1}}]}, "finite number"),
        ({"sources": [{"path": other, "weight": float("inf")}]}, "finite number"),
    ):
        with pytest.raises(ValueError, match=why):
            stream(model, wrong)
    [left] = stream(model, {"sources": [{"path": corpus, "weights": {"own": 1, "replay": 0}}]}).sources
    assert left.only == "own"


@pytest.mark.parametrize(
    ("part", "content", "message"),
    [
        (
            "train/00001.jsonl",
            None,
            "train has 1 files of the 2 in corpus.json: copy the folder anew or build it again",
        ),
        ("held_out/00000.jsonl", None, "held_out has 0 files of the 1 in corpus.json"),
        ("train/sub/00002.jsonl", b"{}", "train has 3 files of the 2"),
        ("train/00000.jsonl", b'{"text": "cut', "the files of .* are not those in its corpus.json: copy the folder"),
        ("corpus.json", b'{"parts"', "is not the record of `etude corpus build`"),
        ("corpus.json", b"{}", "is not the record of `etude corpus build`"),
    ],
)
@pytest.mark.parametrize("key", ["files", "sources", "held_out"])
def test_a_corpus_folder_that_is_not_whole_is_refused(
    model: Path, tmp_path: Path, part: str, content: bytes | None, message: str, key: str
) -> None:
    files = mixture(tmp_path)
    path = tmp_path / "corpus"
    chosen = {"files": {"files": [path]}, "sources": files, "held_out": {**files, "held_out": [path]}}[key]
    stream(model, chosen)
    (path / part).unlink(missing_ok=True)
    if content is not None:
        (path / part).parent.mkdir(exist_ok=True)
        (path / part).write_bytes(content)
    with pytest.raises(UserError, match=message):
        stream(model, chosen)


def test_a_file_that_changes_while_it_is_read_is_named(model: Path, tmp_path: Path) -> None:
    file = texts(tmp_path / "some.jsonl", 9000, longest=6)
    made = maker(stream(model, {"files": [file]}))
    assert made.window() is not None
    os.utime(file, ns=(1, 1))
    with pytest.raises(UserError, match=r"some\.jsonl has changed since the run began"):
        list(windows(made))


def test_the_files_of_a_run_are_those_of_its_beginning(model: Path, tmp_path: Path) -> None:
    folder, kept = tmp_path / "rows", tmp_path / "files.json"
    one, two = texts(folder / "one.jsonl", 10), texts(folder / "two.jsonl", 10)
    rows = {"files": [folder]}
    for _ in range(2):
        data.keep_files(stream(model, rows).files, kept)
    os.utime(one, ns=(1, 1))
    data.keep_files(stream(model, rows).files, kept)
    texts(folder / "three.jsonl", 1)
    with pytest.raises(UserError, match=r"three\.jsonl has changed"):
        data.keep_files(stream(model, rows).files, kept)
    (folder / "three.jsonl").unlink()
    before = two.read_text()
    two.write_text(before.replace("tree 9", "tree 8"))
    with pytest.raises(UserError, match=r"two\.jsonl has changed"):
        data.keep_files(stream(model, rows).files, kept)
    two.unlink()
    with pytest.raises(UserError, match=r"two\.jsonl has changed"):
        data.keep_files(stream(model, rows).files, kept)


def test_estimates_say_which_source_ends_a_run(model: Path, tmp_path: Path) -> None:
    rows = stream(model, mixture(tmp_path))
    made = maker(rows)
    total = sum(one.cursor.taken for _ in windows(made) for one in made.readers[:1])
    assert total
    tokens = sum(reader.cursor.taken for reader in made.readers)
    *_, last = lines = data.described(data.estimates(rows), None)
    assert len(lines) == 4
    assert last.endswith("corpus:own ends")
    assert int(last.split("about ")[1].split()[0].replace(",", "")) == pytest.approx(tokens, rel=0.02)
    assert data.described(data.estimates(rows), 1000)[-1] == "data: a run of 1,000 tokens"


def test_a_trace_of_a_killed_run_is_cut_where_it_goes_on(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"trainer": {"batch": 2}}')
    with pytest.raises(UserError, match="has not begun"):
        list(provenance.trace(tmp_path, 1))
    row = [0, 0, 5, 1, 3, 9]
    for window in range(3):
        documents = [["a", "own", 0, 1], ["b", "", 0, 2]]
        line = {"window": window, "row": 3 * window, "files": ["f.jsonl"], "documents": documents, "rows": [row] * 3}
        provenance.add(tmp_path, json.dumps(line) + "\n")
    provenance.add(tmp_path, '{"window": 3, "ro')
    pieces = list(provenance.trace(tmp_path, 2))
    assert [(one.row, one.id, one.source, one.first, one.count) for one in pieces] == [
        (2, "a", "own", 0, 5), (2, "b", "", 3, 9), (3, "a", "own", 0, 5), (3, "b", "", 3, 9),
    ]  # fmt: skip
    assert len(list(provenance.trace(tmp_path, 5))) == 2
    with pytest.raises(UserError, match="no step 6 yet"):
        list(provenance.trace(tmp_path, 6))
    provenance.cut(tmp_path, 1)
    assert len((tmp_path / provenance.NAME).read_text().splitlines()) == 1
    with pytest.raises(UserError, match="no step 3 yet"):
        list(provenance.trace(tmp_path, 3))
