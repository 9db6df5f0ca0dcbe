"""The wrong edits that a model makes to broken functions, for fine-tuning on what comes after them.

Beside the trainer and the engine, because it needs both: the trainer's corpus and the engine's sampling.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from pathlib import Path

import torch

from etude.corpus import tokenizer as bpe
from etude.corpus.dialect import IDS
from etude.corpus.episodes import Broken, break_function, inferable
from etude.corpus.filters import Function
from etude.corpus.tries import Tried, edit_said, opening, save, tried
from etude.inference.engine import Engine, Limits
from etude.inference.rows import Request
from etude.models.loading import load_model
from etude.trainer.pretrain import corpus_of
from etude.trainer.pretrain_config import SftConfig

log = logging.getLogger(__name__)

_MAX_TOKENS = 96
_AT_ONCE = 256  # broken functions whose samples are in the engine at the same time
_TIMEOUT = 600.0  # seconds for one edit, waiting included


def sample_tries(config: SftConfig) -> Path:
    """Breaks `config.tries.functions` functions of the corpus, lets the stage's model edit each of them
    `config.tries.samples` times at temperature 1, and keeps what is wrong. Returns the file.
    """
    path = config.tries_file
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = random.Random(config.seed + 2)
    short = [f for f in corpus_of(config.corpus, config.seed).train if f.lines <= config.max_lines]
    broken = _break(short, config, rng)
    tokenizer = bpe.load(config.model)
    torch.set_num_threads(config.optim.threads)
    engine = Engine(load_model(config.model, dtype=torch.bfloat16), limits=Limits(rows=128))
    engine.start()
    found: list[Tried] = []
    try:
        for at in range(0, len(broken), _AT_ONCE):
            some = broken[at : at + _AT_ONCE]
            rows = [
                [
                    engine.submit(
                        Request(
                            ids=opening(one, tokenizer),
                            max_tokens=_MAX_TOKENS,
                            stop=(IDS["<|call|>"], IDS["<|end|>"]),
                            seed=rng.getrandbits(63),
                        )
                    )
                    for _ in range(config.tries.samples)
                ]
                for one in some
            ]
            for one, samples in zip(some, rows, strict=True):
                edits = [edit_said(row.future.result(_TIMEOUT).ids, tokenizer) for row in samples]
                found.append(tried(one, edits))
            log.info("%d of %d functions tried", len(found), len(broken))
    finally:
        engine.close()
    save([one for one in found if one.wrong], path)
    return path


def _break(functions: Sequence[Function], config: SftConfig, rng: random.Random) -> list[Broken]:
    """So many different functions, each with one mutation."""
    found: list[Broken] = []
    for function in rng.sample(functions, len(functions)):
        broken = break_function(function, rng, config.operators)
        if broken is not None and (inferable(broken) or rng.random() > 0.65):
            found.append(broken)
        if len(found) == config.tries.functions:
            break
    return found
