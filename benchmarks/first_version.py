"""The first version of a large model from its folder to a follower: publisher and follower alone, no trainer.

    python -m benchmarks.first_version [--gb 8] [--out DIR]

Random bfloat16 weights in a Qwen3 shape of about that size. Each part is a process of its own, and prints seconds, the
deadline that the model's size gives it, bytes in the store, and the peak of its memory (`ru_maxrss`, with pages of
files):

    publish, follow      the whole copy (`weights.anchor_first`), to tensors of zeros
    publish-folder, follow-folder    nothing but the digest: the follower has loaded the folder
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from etude.models import size_of
from etude.models.loading import named_tensors
from etude.run.versions import SWAP_SECONDS, SWAP_SECONDS_A_GB
from etude.store import open_store
from etude.weights import newest_manifest
from etude.weights.export import folder_tensors
from etude.weights.publisher import PUBLISH_SECONDS, SECONDS_A_GB, Publisher
from etude.weights.receiver import Receiver
from etude.weights.ulpd import weights_digest

LAYER = 201e6  # bytes of a layer of this shape


def shape(gb: float) -> Qwen3Config:
    """Qwen3-4B's layers, as many as make this size with a vocabulary of 32,000."""
    return Qwen3Config(
        hidden_size=2560, intermediate_size=9728, num_hidden_layers=max(1, round((gb * 1e9 - 164e6) / LAYER)),
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, vocab_size=32_000, tie_word_embeddings=True,
        max_position_embeddings=40_960,
    )  # fmt: skip


def make(folder: Path, gb: float) -> None:
    """A folder of random weights."""
    if not folder.exists():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(shape(gb), dtype=torch.bfloat16)
        model.save_pretrained(folder.with_suffix(".part"), max_shard_size="1GB")
        folder.with_suffix(".part").rename(folder)


def publish(folder: Path, store: str, *, of_folder: bool) -> Callable[[], str]:
    """Publishes the folder's weights as version 0; returns the work that is timed, which returns the digest."""
    tensors = folder_tensors(folder)
    return lambda: Publisher(open_store(store), of_folder=of_folder).publish(0, tensors, (), {}, last=True).digest


def follow(folder: Path, store: str, *, of_folder: bool) -> Callable[[], str]:
    """Takes version 0 into tensors of zeros, or into those of the folder."""
    if of_folder:
        tensors = folder_tensors(folder)
    else:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(Qwen3Config.from_pretrained(folder), dtype=torch.bfloat16)
        tensors = {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in named_tensors(model).items()}

    def work() -> str:
        receiver = Receiver(open_store(store), tensors)
        assert receiver.advance(lambda version, apply: apply())
        return weights_digest(tensors, receiver.types)

    return work


PARTS = {
    "publish": (publish, False), "follow": (follow, False),
    "publish-folder": (publish, True), "follow-folder": (follow, True),
}  # fmt: skip


def measured(name: str, folder: Path, out: Path) -> dict[str, object]:
    """Seconds of a part, in this process."""
    prepare, of_folder = PARTS[name]
    store, gb = str(out / ("of-folder" if of_folder else "whole")), size_of(folder) / 1e9
    work, began = prepare(folder, store, of_folder=of_folder), time.monotonic()
    digest = work()
    seconds = time.monotonic() - began
    publishing, arriving = PUBLISH_SECONDS + SECONDS_A_GB * gb, SWAP_SECONDS["etude"] + SWAP_SECONDS_A_GB * gb
    manifest = newest_manifest(open_store(store))
    assert manifest is not None
    if digest != manifest.digest:
        raise RuntimeError(f"{name}: the digest is {digest}, published was {manifest.digest}")
    return {
        "part": name, "gb": round(gb, 2), "seconds": round(seconds, 1),
        "deadline": round(publishing if prepare is publish else arriving), "bytes": manifest.payload_bytes,
        "peak_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 1),
    }  # fmt: skip


def main() -> int:
    """Runs the parts one after the other."""
    parser = argparse.ArgumentParser(prog="benchmarks.first_version")
    parser.add_argument("--gb", type=float, default=8.0)
    parser.add_argument("--out", type=Path, default=Path("outputs/first-version"))
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    folder = arguments.out / f"model-{arguments.gb:g}"
    if arguments.part:
        print(json.dumps(measured(arguments.part, folder, arguments.out)), flush=True)
        return 0
    arguments.out.mkdir(parents=True, exist_ok=True)
    make(folder, arguments.gb)
    for store in ("whole", "of-folder"):
        shutil.rmtree(arguments.out / store, ignore_errors=True)
    words = [sys.executable, "-m", "benchmarks.first_version", "--gb", str(arguments.gb), "--out", str(arguments.out)]
    return max(subprocess.run([*words, "--part", part], check=False).returncode for part in PARTS)


if __name__ == "__main__":
    sys.exit(main())
