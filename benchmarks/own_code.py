"""Measurements of training on own code, each one command. docs/figures/own-code.json has what they gave.

general   writes general texts: the descriptions of the installed packages, and the topics of Python's reference
losses    the loss of each document of rows under a model, and whether it would copy the old text of each edit call
planted   writes sources with secrets and with copies of a suite's answers, and a list of what must not be learned
compare   the paired difference of two files of `losses`, with a bootstrap interval over documents
probe     samples from a model, searched for planted texts

    python -m benchmarks.own_code general DIR
    python -m benchmarks.own_code planted DATASET DIR
    python -m benchmarks.own_code losses MODEL ROWS... -o FILE [--documents N] [--length N]
    python -m benchmarks.own_code compare BEFORE AFTER
    python -m benchmarks.own_code probe MODEL ROWS... --texts FILE [--samples N]
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import pydoc_data.topics
import random
import string
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from etude.config import EngineConfig, ModelConfig
from etude.corpus import LearnedRow, chat_files
from etude.corpus.chats import read_row
from etude.corpus.dialect import SPECIALS
from etude.corpus.documents.suites import suite_pieces
from etude.inference.engine.engine import Engine
from etude.inference.engine.requests import Request
from etude.models.head import head_of
from etude.models.loading import load_model
from etude.renderers import Renderer, renderer_for
from etude.renderers.compact import IDS
from etude.trainer.finetune.config import MidtrainConfig
from etude.trainer.finetune.data import StreamData

LEAST = 400  # characters of a general text
RESAMPLES = 10_000


def _draw(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")


def write_general(folder: Path) -> None:
    """Writes each text into `train` or, every fifth by its digest, into `held_out`."""
    packages = {one.name.lower(): str(one.metadata.get_payload()) for one in importlib.metadata.distributions()}
    for name, text in sorted((packages | pydoc_data.topics.topics).items()):
        if len(text) >= LEAST:
            part = folder / ("held_out" if _draw(name) % 5 == 0 else "train")
            part.mkdir(parents=True, exist_ok=True)
            (part / f"{name}.md").write_text(text, encoding="utf-8")


def write_planted(dataset: Path, folder: Path, count: int = 100) -> None:
    """Writes modules into `own`: `count` with a secret each, `count` with an answer of a held-out task each, from the
    first line that the dataset's broken file lacks on; `texts.txt` holds the secrets, `hunks.txt` those lines."""
    rng, letters = random.Random(5), string.ascii_letters + string.digits
    forms = {"ghp_": 36, "glpat-": 20, "npm_": 36, "sk_live_": 28, "AIza": 35, "hf_": 34}
    kinds = list(forms)
    (folder / "own").mkdir(parents=True)
    secrets = [kinds[n % 6] + "".join(rng.choices(letters, k=forms[kinds[n % 6]])) for n in range(count)]
    pieces = sorted({piece for piece in suite_pieces(dataset) if len(piece.splitlines()) >= 4}, key=_draw)[:count]
    for number, text in enumerate([*(f'TOKEN = "{one}"' for one in secrets), *pieces]):
        lines = [f"def part_{number}_{n}(value):\n    return value * {rng.randrange(10**6)} + {n}\n" for n in range(6)]
        whole = "\n\n".join([*lines[:3], text + "\n", *lines[3:]])
        (folder / "own" / f"m{number}.py").write_text(whole, encoding="utf-8")
    hunks = [max(map(str.strip, piece.splitlines()), key=len) for piece in pieces]
    for name, texts in (("texts", secrets), ("hunks", hunks)):
        (folder / f"{name}.txt").write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")


def documents(model: Path, rows: Sequence[Path], most: int) -> Iterator[LearnedRow]:
    """The documents of files or corpus folders (their held-out part, if there is one), as training encodes them; `most`
    of them by the digests of their ids."""
    values = {"model": {"path": str(model)}, "data": {"files": [str(path) for path in rows]}}
    encoders = StreamData.of(MidtrainConfig.model_validate(values)).encoders
    lines: list[tuple[int, str, bytes]] = []
    for path in rows:
        held_out = path.is_dir() and any((path / "held_out").glob("*.jsonl"))
        for file in chat_files(path, "held_out" if held_out else "train"):
            for number, line in enumerate(file.read_bytes().splitlines()):
                name = f"{file}:{number}"
                lines.append((_draw(json.loads(line).get("id", name)), name, line))
    for _, name, line in sorted(lines)[:most]:
        yield from (row for row in read_row(name, line, encoders) if isinstance(row, LearnedRow))


def losses(folder: Path, rows: Sequence[Path], most: int, length: int) -> Iterator[dict[str, Any]]:
    """For each document its learned tokens among the first `length`, the sum of their losses in nats, and for each edit
    call whether every token of its old text is the most likely one."""
    model, renderer = load_model(folder, dtype=torch.bfloat16), renderer_for(folder, tools=False)
    for row in documents(folder, rows, most):
        ids, mask = (values[:length].astype(np.int64) for values in row.tokens)
        learned = np.flatnonzero(mask[1:])
        if len(learned):
            loss_T, best_T = _scored(model, ids)
            copied = [bool((best_T[a - 1 : b - 1] == ids[a:b]).all()) for a, b in _old_texts(renderer, ids, mask)]
            where = {"id": row.id or row.name, "source": row.source}
            yield where | {"tokens": len(learned), "loss": float(loss_T[learned].sum()), "copied": copied}


@torch.inference_mode()
def _scored(model: PreTrainedModel, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Losses and most likely ids of the tokens behind the first, [T-1]."""
    ids_T = torch.from_numpy(ids)
    hidden_SD = model.get_decoder()(input_ids=ids_T[None, :-1], use_cache=False).last_hidden_state[0]
    head, parts = head_of(model), list[tuple[np.ndarray, np.ndarray]]()
    for part_CD, target_C in zip(hidden_SD.split(256), ids_T[1:].split(256), strict=True):
        logits_CV = head.logits(part_CD).float()
        loss_C = torch.nn.functional.cross_entropy(logits_CV, target_C, reduction="none")
        parts.append((loss_C.numpy(), logits_CV.argmax(-1).numpy()))
    return np.concatenate([loss for loss, _ in parts]), np.concatenate([best for _, best in parts])


def _old_texts(renderer: Renderer, ids: np.ndarray, mask: np.ndarray) -> Iterator[tuple[int, int]]:
    """Where the old texts of learned edit calls stand, with the token that ends them; none but in the compact dialect:
    the call's name, then each argument, between special tokens; the new text is the last one."""
    if renderer.dialect != "compact":
        return
    marks = [IDS[name] for name in ("<|call|>", "<|arg|>")]
    for at in np.flatnonzero((ids == marks[0]) & (mask == 1)).tolist():
        edges = [at, *(at + 1 + np.flatnonzero(ids[at + 1 :] < len(SPECIALS))).tolist()]
        count = next((n for n, edge in enumerate(edges[1:]) if ids[edge] != marks[1]), 0)  # of the arguments
        if count >= 2 and renderer.text(ids[at + 1 : edges[1]].tolist()) == "edit":
            yield edges[count - 1] + 1, edges[count] + 1


def compare(before: Iterable[dict[str, Any]], after: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Losses a token before and after on the same documents, their relative difference, and the difference of the
    shares of copied old texts, each with a 95 % bootstrap interval over documents. Raises ValueError for other
    documents."""
    rows = [list(before), list(after)]
    if [row["id"] for row in rows[0]] != [row["id"] for row in rows[1]]:
        raise ValueError("the two files are of other documents")
    tokens = np.array([row["tokens"] for row in rows[0]])
    losses_2D = np.array([[row["loss"] for row in side] for side in rows])
    result: dict[str, Any] = {"documents": len(tokens), "tokens": int(tokens.sum())}
    result |= {"loss": (losses_2D.sum(1) / tokens.sum()).round(4).tolist()}
    result |= {"relative": _ratio(losses_2D[1] - losses_2D[0], losses_2D[0])}
    counts = np.array([len(row["copied"]) for row in rows[0]])
    if counts.sum():
        copied_2D = np.array([[sum(row["copied"]) for row in side] for side in rows])
        result |= {"edits": int(counts.sum()), "copied": (copied_2D.sum(1) / counts.sum()).round(4).tolist()}
        result |= {"copied_difference": _ratio(copied_2D[1] - copied_2D[0], counts)}
    return result


def _ratio(over_D: np.ndarray, under_D: np.ndarray) -> list[float]:
    """The ratio of two sums over documents, and its 2.5 and 97.5 % quantiles when documents are drawn anew."""
    draws_RD = np.random.default_rng(0).multinomial(len(under_D), np.full(len(under_D), 1 / len(under_D)), RESAMPLES)
    sums_R = draws_RD @ under_D
    ratios_R = (draws_RD @ over_D)[sums_R > 0] / sums_R[sums_R > 0]
    return [round(float(x), 4) for x in (over_D.sum() / under_D.sum(), *np.quantile(ratios_R, [0.025, 0.975]))]


def probe(folder: Path, rows: Sequence[Path], texts: Sequence[str], samples: int, tokens: int) -> dict[str, int]:
    """How many of the texts stand in answers that begin with a beginning of a document, and in how many answers."""
    model = load_model(folder, dtype=torch.bfloat16)
    engine = Engine(model, EngineConfig(max_batch=64))
    renderer = renderer_for(folder, tools=False)
    starts = [row.tokens[0] for row in documents(folder, rows, samples)]
    rng, futures = np.random.default_rng(0), list[Any]()
    for number in range(samples):
        ids = starts[number % len(starts)]
        first = int(rng.integers(0, max(1, len(ids) - 48)))
        request = Request(ids=ids[first : first + 48].tolist(), max_tokens=tokens, seed=number)
        futures.append(engine.submit(request).future)
    while not all(future.done() for future in futures):
        engine.step()
    answers = [renderer.text(future.result().ids) for future in futures]
    return {
        "answers": len(answers),
        "texts": sum(any(text in answer for answer in answers) for text in texts),
        "answers with a text": sum(any(text in answer for text in texts) for answer in answers),
    }


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    """Runs one measurement."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.own_code", description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("general").add_argument("folder", type=Path)
    planted = commands.add_parser("planted")
    planted.add_argument("dataset", type=Path)
    planted.add_argument("folder", type=Path)
    for name in ("losses", "probe"):
        one = commands.add_parser(name)
        one.add_argument("model")
        one.add_argument("rows", type=Path, nargs="+")
    commands.choices["losses"].add_argument("-o", "--output", type=Path, required=True)
    commands.choices["losses"].add_argument("--documents", type=int, default=200)
    commands.choices["losses"].add_argument("--length", type=int, default=512)
    commands.choices["probe"].add_argument("--texts", type=Path, required=True, help="one text in a line")
    commands.choices["probe"].add_argument("--samples", type=int, default=1000)
    commands.choices["probe"].add_argument("--tokens", type=int, default=32)
    both = commands.add_parser("compare")
    both.add_argument("before", type=Path)
    both.add_argument("after", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.command == "general":
        return write_general(options.folder)
    if options.command == "planted":
        return write_planted(options.dataset, options.folder)
    if options.command == "compare":
        return print(json.dumps(compare(_read(options.before), _read(options.after))))
    folder = Path(ModelConfig(path=options.model).path)
    if options.command == "losses":
        _write(options.output, losses(folder, options.rows, options.documents, options.length))
    else:
        texts = options.texts.read_text(encoding="utf-8").splitlines()
        print(json.dumps(probe(folder, options.rows, texts, options.samples, options.tokens)))


if __name__ == "__main__":
    main()
