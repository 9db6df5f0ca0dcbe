"""`etude COMMAND`: the table of commands, and the exit codes of errors.

A command is a module of this package with two functions: `add(parser)` adds its flags, `run(arguments, rest)` does its
work, prints, and returns the exit code (None: 0). Only the module of the command on the command line is imported, so
that `etude --help` answers at once.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import select
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from etude.errors import RunFailed, UserError

OLDEST = (3, 11)  # Python; as `requires-python` in pyproject.toml
READER_GONE = 128 + 13  # as a shell reports a program that SIGPIPE ended

COMMANDS = {
    "demo": "train the bundled nano model on a real library, on two CPU cores",
    "init": "write a configuration for the repository in this folder, or an environment of your own",
    "tasks": "make and check tasks from a repository",
    "corpus": "say which documents a step was trained on",
    "train": "run a training stage: midtrain, sft, apply or rl",
    "eval": "measure a model on a task dataset",
    "serve": "serve a model over an OpenAI-compatible HTTP API",
    "models": "list the models that have a name",
    "weights": "inspect, verify, move and tidy the versions of a weight store",
    "fleet": "add engines and players to a run, and see them",
    "live": "learn from users, and release to them",
    "apply": "apply a sketched edit to a file",
    "export": "write the episodes of a run as ATIF trajectories, tokens included",
    "doctor": "check what this machine can do, and what its boxes refuse",
    "bench": "run a benchmark",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a command and exits: 0, or the command's code; 2 with one sentence for an error that the user can fix, 1 for
    another failure of a run, 130 after Ctrl-C, 141 in silence when the reader of the output has gone (`| head`)."""
    with _read_to_the_end():
        if refusal := too_old(sys.version_info[:3]):
            _fail(refusal)
        words = list(sys.argv[1:] if argv is None else argv)
        arguments, rest = command_parser(words).parse_known_args(words)
        arguments.words = words
        if rest and not arguments.takes_overrides:
            _fail(f"unexpected argument {rest[0]!r}; see `etude {arguments.command} --help`")
        from etude.cli import needs
        from etude.code import missing_extra_message, need

        name = f"`etude {needs.name_of(arguments)}`"
        try:
            need(name, *needs.extras_of(arguments))
            code = arguments.run(arguments, rest)
        except UserError as e:
            _fail(str(e))
        except ModuleNotFoundError as e:  # needed by a value of the configuration, such as a table of edits
            sentence = missing_extra_message(name, e.name or "")
            if sentence is None:
                raise
            _fail(sentence)
        except PermissionError as e:
            if e.filename is None:  # a port, a process, a mount: no path
                raise
            _fail(f"{e.filename} is not yours to read or write ({e.strerror}): name another path, or change its rights")
        except OSError as e:
            if e.errno != errno.ENAMETOOLONG:
                raise
            _fail(f"{str(e.filename)[:60]}... is longer than a name may be: name another path")
        except RunFailed as e:
            print(f"etude: {e}", file=sys.stderr)
            sys.exit(1)
        except KeyboardInterrupt:
            advice = getattr(arguments, "interrupted", "nothing is left half-written")
            print(f"\netude: interrupted; {advice}", file=sys.stderr)
            sys.exit(130)
        sys.exit(code or 0)


@contextmanager
def _read_to_the_end() -> Iterator[None]:
    """Exits with READER_GONE if the reader of the output has gone."""
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:  # closed by the caller
                sys.stdout.flush()
    except BrokenPipeError:
        if not _reader_gone():  # another pipe: a process of ours died
            raise
        sys.exit(READER_GONE)


def _reader_gone() -> bool:
    """Whether the reader of standard output or error has gone. Such a stream then writes to /dev/null, so that the
    interpreter's last flush succeeds."""
    gone = False
    for stream in filter(None, (sys.stdout, sys.stderr)):
        poll = select.poll()
        poll.register(stream.fileno(), 0)  # errors and hang-ups are always reported
        if poll.poll(0):
            gone = True
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
    return gone


def too_old(version: tuple[int, ...]) -> str:
    """The sentence for an interpreter that cannot run etude; "" for others."""
    if version >= OLDEST:
        return ""
    oldest, this = ".".join(map(str, OLDEST)), ".".join(map(str, version))
    return f"this is Python {this}; make a virtual environment of Python {oldest} or later, and install etude there"


def command_parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of all commands, with the flags of the command in `words`, the command line."""
    parser = argparse.ArgumentParser(
        prog="etude", description="Train your own coding agent on your own product.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=_version() if "--version" in words else "")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    chosen = next((word for word in words if not word.startswith("-")), None)
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        if name == chosen:
            module = importlib.import_module(f"etude.cli.{name}")
            command.set_defaults(run=module.run, takes_overrides=False)
            module.add(command)
    return parser


def _version() -> str:
    from importlib.metadata import version

    return version("etude")


def _fail(sentence: str) -> None:
    print(f"etude: {sentence}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
