"""`etude serve MODEL`: an inference server with an OpenAI-compatible API, which may follow a store of weights."""

from __future__ import annotations

import argparse
from pathlib import Path

from etude.cli.flags import add_flags, flag_values, from_flags
from etude.config import ModelConfig, ServerConfig, WeightSource, validate
from etude.errors import UserError
from etude.models import check_folder
from etude.protocol import access_of, add_access_flags
from etude.weights import model_folder

_OWN = [name for name in ServerConfig.model_fields if name not in ("model", "source")]


def add(parser: argparse.ArgumentParser) -> None:
    """Flags of `etude serve`."""
    named = "HF folder, run folder (RUN@12: version 12), GGUF file, or the name of a model such as nano (etude models)"
    parser.add_argument("model", help=named)
    add_flags(parser, ModelConfig, ("chat_template",))
    add_flags(parser, ServerConfig, _OWN)
    add_access_flags(parser.add_argument_group("access", "who may ask (docs/serving.md)"))
    add_flags(parser.add_argument_group("weights", "follow a store (docs/weights.md)"), WeightSource)


def run(arguments: argparse.Namespace, rest: list[str]) -> None:
    """Serves until interrupted. Raises UserError for a bad folder, a taken port or flags of a store without
    --weights."""
    source, access = None, access_of(arguments)
    if following := flag_values(arguments, WeightSource):
        if "weights" not in following:
            flags = ", ".join("--" + name.replace("_", "-") for name in following)
            raise UserError(f"{flags}: give the store with --weights, too")
        source = validate(WeightSource, following, "etude serve")
    folder = model_folder(arguments.model, getattr(arguments, "chat_template", None))
    config = from_flags(arguments, ServerConfig, model=str(folder), source=source)
    check_folder(folder)
    name = Path(arguments.model).resolve().name
    if not config.served_model_name:
        config = config.model_copy(update={"served_model_name": (name,)})
    if not (folder / "tokenizer.json").is_file():
        print(f"{folder} has no tokenizer.json: /generate takes token ids, texts are refused", flush=True)
    if folder.name != name:
        print(f"{arguments.model}: {folder}", flush=True)
    from etude.inference.server import server

    server.run(config, access)
