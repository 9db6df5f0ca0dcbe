"""The files of a Hugging Face folder, read without torch: a user's mistakes are reported before loading."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from etude.errors import UserError, first_line

INDEX = "model.safetensors.index.json"


def check_folder(root: Path) -> None:
    """Raise UserError unless `root` has a config.json and complete safetensors files."""
    if not root.is_dir():
        raise UserError(f"{root} is not a folder: give the path of a Hugging Face model folder")
    if not (root / "config.json").is_file():
        raise UserError(f"{root} has no config.json: give the path of a Hugging Face model folder")
    try:
        json.loads((root / "config.json").read_text())
    except ValueError as e:
        raise UserError(f"{root / 'config.json'} is not valid JSON: {e}") from None
    if not (root / INDEX).is_file() and not (root / "model.safetensors").is_file():
        raise UserError(f"{root} has no model.safetensors: give the path of a Hugging Face model folder")
    for shard in shards(root):
        check_safetensors(shard)


def is_gguf(path: Path) -> bool:
    """Whether `path` is a GGUF file, or a folder with GGUF files and no config.json."""
    if path.is_dir():
        return not (path / "config.json").is_file() and any(path.glob("*.gguf"))
    return path.suffix == ".gguf" and path.is_file()


def shards(root: Path) -> list[Path]:
    """The safetensors files of a folder. Raises UserError for a damaged index."""
    if (root / INDEX).is_file():
        try:
            return [root / name for name in sorted({*json.loads((root / INDEX).read_text())["weight_map"].values()})]
        except (ValueError, KeyError, AttributeError, TypeError):
            raise UserError(f"{root / INDEX} is damaged: fetch the model again") from None
    return [root / "model.safetensors"]


def size_of(root: Path) -> int:
    """Bytes of a folder's safetensors files; 0 without any."""
    return sum(file.stat().st_size for file in root.glob("*.safetensors"))


def headers(root: Path) -> Iterator[tuple[Path, str, dict[str, Any]]]:
    """File, name and header entry (dtype, shape, data_offsets) of each tensor. The files must be complete
    (`check_folder`)."""
    for file in shards(root):
        with file.open("rb") as f:
            header = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
        yield from ((file, name, about) for name, about in header.items() if name != "__metadata__")


def expert_layers(root: Path) -> list[int]:
    """The numbers of a checkpoint's layers with experts, by the names of its tensors. Raises UserError for a folder
    without complete weights."""
    for shard in shards(root):
        check_safetensors(shard)
    matches = (re.search(r"(?:^|\.)layers\.(\d+)\.(?:.+\.)?experts\.", name) for _, name, _ in headers(root))
    return sorted({int(match[1]) for match in matches if match})


def check_safetensors(path: Path) -> None:
    """Raise UserError unless the file's header parses and agrees with the file's length."""
    if not path.is_file():
        raise UserError(f"{path} is missing: fetch the model again")
    size = path.stat().st_size
    try:
        with path.open("rb") as f:
            (header_size,) = struct.unpack("<Q", f.read(8))
            if header_size > size - 8:
                raise ValueError("its header is longer than the file")
            header = json.loads(f.read(header_size))
        end = max((tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as e:
        raise UserError(f"{path} is damaged ({first_line(e)}): fetch the model again") from None
    if 8 + header_size + end != size:
        raise UserError(
            f"{path} is damaged: {size} bytes instead of the {8 + header_size + end} its header says; "
            "fetch the model again"
        )
