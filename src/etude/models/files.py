"""The files of a Hugging Face folder, read without torch: a user's mistakes are reported before loading."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from etude.errors import UserError, first_line

INDEX = "model.safetensors.index.json"
FLOATS = {"F64", "F32", "F16", "BF16"}
_KINDS = {
    4: "F4",
    6: "F6_E2M3 F6_E3M2",
    8: "BOOL U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ",
    16: "I16 U16 F16 BF16",
    32: "I32 U32 F32",
    64: "I64 U64 F64 C64",
}
_BITS = {kind: bits for bits, kinds in _KINDS.items() for kind in kinds.split()}
"""Bits of a number, by the types of safetensors."""


def check_folder(root: Path) -> None:
    """Raise UserError unless `root` has a configuration and complete safetensors files without quantisation."""
    written = check_config(root)
    if not (root / INDEX).is_file() and not (root / "model.safetensors").is_file():
        pickles = sorted(file.name for file in root.glob("*.bin"))
        if pickles:
            raise UserError(f"{root} has its weights in {pickles[0]}, a pickle, which is never read: give safetensors")
        raise UserError(f"{root} has no model.safetensors: give the path of a Hugging Face model folder")
    _check_files(root)
    if why := quantised(root, written):
        raise UserError(f"{root} {why}")


def check_present(root: Path) -> None:
    """`check_folder` for what is there: weights may be missing altogether, as where a run is planned for another
    machine."""
    check_config(root)
    if has_weights(root):
        check_folder(root)


def has_weights(root: Path) -> bool:
    """Whether a folder has files of weights, of any format, or an index."""
    return any(root.glob("*.safetensors")) or any(root.glob("*.bin")) or (root / INDEX).is_file()


def check_config(root: Path) -> dict[str, Any]:
    """The object in a folder's config.json. Raises UserError unless it names the type of a model."""
    if not root.is_dir():
        raise UserError(f"{root} is not a folder: give the path of a Hugging Face model folder")
    if (root / "adapter_config.json").is_file():
        raise UserError(f"{root} holds adapters (LoRA): merge them into their model, and give the merged folder")
    file = root / "config.json"
    if not file.is_file():
        raise UserError(f"{root} has no config.json: give the path of a Hugging Face model folder")
    try:
        written = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as e:
        raise UserError(f"{file} is not valid JSON: {first_line(e)}") from None
    if not isinstance(written, dict) or not isinstance(written.get("model_type"), str):
        raise UserError(f"{file} names no model_type: give the path of a Hugging Face model folder")
    return written


def _check_files(root: Path) -> None:
    """Raise UserError for files that are damaged or missing, tensors of the index that they lack, and an index of fewer
    files than their names count."""
    for shard in shards(root):
        check_safetensors(shard)
    if not (root / INDEX).is_file():
        return
    files = shards(root)
    counts = {int(match[1]) for file in files if (match := re.search(r"-of-(\d{5})\.safetensors$", file.name))}
    if counts and counts != {len(files)}:
        raise UserError(f"{root / INDEX} names {len(files)} of {max(counts)} files: fetch the model again")
    present = {name for _, name, _ in headers(root)}
    lost = sorted(json.loads((root / INDEX).read_bytes())["weight_map"].keys() - present)
    if lost:
        raise UserError(f"{root} lacks {len(lost)} tensors of its index, e.g. {lost[0]}: fetch the model again")


def quantised(root: Path, written: dict[str, Any]) -> str:
    """The reason why the weights of a folder cannot be computed with, if they are quantised; "" if they are not."""
    about = written.get("quantization_config") or (written.get("text_config") or {}).get("quantization_config")
    kinds = {about["dtype"] for _, _, about in headers(root)}
    narrow = sorted(kind for kind in kinds if kind[0] == "F" and kind not in FLOATS)
    if not about and not narrow:
        return ""
    method = [str(about["quant_method"])] if isinstance(about, dict) and about.get("quant_method") else []
    name = ", ".join([*method, *narrow]) or "by its config.json"
    return f"is quantised ({name}), and such weights are not computed with: give the folder without quantisation"


def is_quantised(root: Path) -> bool:
    """Whether `root` is a complete folder whose weights are quantised."""
    try:
        written = check_config(root)
        _check_files(root)
        return bool(quantised(root, written))
    except UserError:  # said where the folder is read
        return False


def is_gguf(path: Path) -> bool:
    """Whether `path` is a GGUF file, or a folder with GGUF files and no config.json."""
    if path.is_dir():
        return not (path / "config.json").is_file() and any(path.glob("*.gguf"))
    return path.suffix == ".gguf" and path.is_file()


def shards(root: Path) -> list[Path]:
    """The safetensors files of a folder. Raises UserError for a damaged index."""
    if (root / INDEX).is_file():
        try:
            names = set(json.loads((root / INDEX).read_bytes())["weight_map"].values())
            if not names or not all(isinstance(name, str) and name == Path(name).name for name in names):
                raise ValueError
            return [root / name for name in sorted(names)]
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
        end = _end_of_data({name: tensor for name, tensor in header.items() if name != "__metadata__"})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as e:
        raise UserError(f"{path} is damaged ({first_line(e)}): fetch the model again") from None
    if 8 + header_size + end != size:
        raise UserError(
            f"{path} is damaged: {size} bytes instead of the {8 + header_size + end} its header says; "
            "fetch the model again"
        )


def _end_of_data(tensors: dict[str, Any]) -> int:
    """Where a header's last tensor ends. Raises ValueError, KeyError or TypeError unless the tensors have types and
    sizes, and lie one behind the other."""
    end = 0
    for start, stop, name in sorted((*tensor["data_offsets"], name) for name, tensor in tensors.items()):
        kind, shape = tensors[name]["dtype"], tensors[name]["shape"]
        if kind not in _BITS or not all(isinstance(n, int) and n >= 0 for n in shape):
            raise ValueError(f"{name} has the dtype {kind!r} and the shape {shape!r}")
        if start != end or 8 * (stop - start) != math.prod(shape) * _BITS[kind]:
            raise ValueError(f"{name} is not where the tensor before it ends, or has not the bytes of its shape")
        end = stop
    return end
