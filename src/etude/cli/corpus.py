"""`etude corpus trace RUN --step N`: the documents that a step of a run was trained on."""

from __future__ import annotations

import argparse

from etude.cli import corpus_trace


def add(parser: argparse.ArgumentParser) -> None:
    """The arguments of `etude corpus` and of its actions."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    corpus_trace.add_to(actions)


def run(arguments: argparse.Namespace, _: list[str]) -> None:
    """Runs the action. Raises UserError."""
    corpus_trace.trace(arguments)
