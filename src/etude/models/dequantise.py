"""Folders of quantised weights to folders in bfloat16, tensor by tensor, for the two formats in which makers publish
models: FP8 with scales (DeepSeek, Qwen; arXiv:2412.19437, section 3.3) and MXFP4 (gpt-oss; OCP Microscaling v1.0).

    FP8    weight = F8 * scale, a scale for a tensor, a row or a block; rounded once to bfloat16
    MXFP4  weight = FP4 * 2^(scale - 127) for 32 numbers; exact in bfloat16

All other formats keep the sentence that refuses them (`files.quantised`).
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import blake3
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from etude.code import need
from etude.config import cache
from etude.errors import UserError, first_line
from etude.models.files import FLOATS, INDEX, check_config, headers, shards
from etude.runfolder import make_whole

_SCALES = ("_scale_inv", "_scale")
_DROPPED = ("activation_scale", "input_scale", "k_scale", "v_scale", "output_scale")  # of activations and caches


def plan(root: Path) -> dict[str, str] | None:
    """The quantised tensors of a folder by name, each with the name of its scales; None if one has none, or none is
    quantised."""
    names = {name: about for _, name, about in headers(root)}
    scale_of: dict[str, str] = {}
    for name, about in names.items():
        if about["dtype"].startswith("F8_E4M3") and not name.endswith(_SCALES):
            scale = next((name + end for end in _SCALES if name + end in names), None)
        elif about["dtype"] == "U8" and name.endswith("_blocks"):
            scale = name.removesuffix("_blocks") + "_scales"
        else:
            continue
        if scale not in names:
            return None
        scale_of[name] = scale
    left = set(names) - set(scale_of) - set(scale_of.values())
    strange = [name for name in left if names[name]["dtype"] not in FLOATS | {"I64", "BOOL"}]
    return scale_of if scale_of and not strange else None


def write(root: Path, scales: dict[str, str], into: Path) -> None:
    """Writes the folder `root`, whose quantised tensors have `scales`, with bfloat16 in their place. Raises UserError
    for scales that do not fit their tensors."""
    written = check_config(root)
    about = _of(written).pop("quantization_config", None) or {}
    block = about.get("weight_block_size") if isinstance(about, dict) else None
    places = {name: file for file, name, _ in headers(root)}
    index: dict[str, str] = {}
    size = 0
    for shard in shards(root):
        made: dict[str, Tensor] = {}
        with safe_open(shard, "pt") as file:
            for name in (name for name, place in places.items() if place == shard):
                if name in scales:
                    with safe_open(places[scales[name]], "pt") as other:
                        scale = other.get_tensor(scales[name])
                    made[name.removesuffix("_blocks")] = _plain(name, file.get_tensor(name), scale, block)
                elif name not in scales.values() and not name.endswith(_DROPPED):
                    made[name] = file.get_tensor(name)
        save_file(made, into / shard.name, {"format": "pt"})
        index |= dict.fromkeys(made, shard.name)
        size += sum(tensor.nbytes for tensor in made.values())
    if (root / INDEX).is_file():
        (into / INDEX).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": index}, indent=2))
    (into / "config.json").write_text(json.dumps(written, indent=2))
    for file in root.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and not (into / file.name).exists():
            shutil.copyfile(file, into / file.name)


def _of(written: dict[str, Any]) -> dict[str, Any]:
    """The table of a configuration that says how weights are quantised."""
    inner = written.get("text_config")
    return inner if isinstance(inner, dict) and inner.get("quantization_config") else written


def _plain(name: str, tensor: Tensor, scale: Tensor, block: list[int] | None) -> Tensor:
    """Bfloat16 weights of a quantised tensor. `block` has the rows and columns of a scale of FP8."""
    if tensor.dtype == torch.uint8:
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        return convert_moe_packed_tensors(tensor, scale, dtype=torch.bfloat16)
    wide = tensor.float()
    factor = (scale.float() - 127).exp2() if scale.dtype == torch.uint8 else scale.float()
    if factor.numel() == 1:
        return (wide * factor.reshape(())).to(torch.bfloat16)
    if factor.ndim > wide.ndim:
        raise UserError(f"{name} has {wide.ndim} dimensions and its scales {factor.ndim}, which do not fit")
    factor = factor.reshape(*factor.shape, *[1] * (wide.ndim - factor.ndim))
    for axis, (whole, parts) in enumerate(zip(wide.shape, factor.shape, strict=True)):
        if parts in (1, whole):
            continue
        length = block[axis - wide.ndim] if block and wide.ndim - axis <= 2 else -(-whole // parts)
        if parts != -(-whole // length):
            raise UserError(f"{name} has {tuple(wide.shape)} numbers and {tuple(scale.shape)} scales, which do not fit")
        factor = factor.repeat_interleave(length, axis).narrow(axis, 0, whole)
    return (wide * factor).to(torch.bfloat16)


def plain_folder(root: Path) -> Path:
    """A folder in the user's cache with the weights of the quantised folder `root` in bfloat16; `root` itself if their
    format is refused. Earlier results are used again. Raises UserError."""
    need(f"{root}, whose weights are quantised,", "serve")
    if (scales := plan(root)) is None:
        return root
    files = sorted(path for path in root.absolute().iterdir() if path.is_file())
    known = "\n".join(f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in files)
    name = root.absolute().name
    made = cache() / "models" / f"{name}-{blake3.blake3(known.encode()).hexdigest()[:12]}" / name
    if not made.is_dir():
        say = f"etude: the quantised weights of {root} are written in bfloat16, once: {made}"
        print(say, file=sys.stderr, flush=True)
        try:
            make_whole(made, lambda into: write(root, scales, into))
        except SafetensorError as e:
            raise UserError(f"{made} cannot be written: {first_line(e)}; check the disk") from None
    return made
