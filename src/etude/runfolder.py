"""The folder a run leaves behind, and the one rule about it: it is never silently reused.

outputs/NAME/
  config.json  config.toml     resolved; and the files and overrides as given; without secrets
  fleet.json                   resolved, of a run with --fleet
  config.digest                of config.json when the run began or was resumed last
  metrics.jsonl                one object per optimizer step; metrics.next.json is that of a version on its way
  metrics.digests.jsonl        of the lines of metrics.jsonl
  memory.jsonl                 resident bytes of each process
  egress.jsonl                 requests of boxes to the outside, if they may make any
  timeline.jsonl               who did what from when to when
  ledger.db                    or a PostgreSQL URL in config.json
  impossible/                  hidden tests of impossible tasks
  models/N/                    version N as a model folder, once somebody has asked for it
  tasks/                       the task dataset, unless config.json names another
  weights/  rollouts/  probes/ versions, token blobs and engines' scores, unless config.json names a store
  checkpoints/step_N/          rank_R.safetensors and manifest.json; complete ones only
  logs/attempt_N/*.log         one per process; logs/latest points to the last attempt
  logs/attempt_N/*.beat        heartbeats of the run and of a trainer that others start
  eval-before.json  eval-after.json
  report.html  report.json
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import blake3

from etude.config import FleetConfig, RLConfig, validate
from etude.config.secrets import redacted, without_secrets
from etude.errors import UserError
from etude.store import write_durably

_BEGAN = time.time() - time.monotonic()
PRIVATE = 0o600  # mode of files that may name what is secret
RUN_BEAT, TRAINER_BEAT = "run.beat", "trainer.beat"
"""Files of an attempt with the heartbeats of the run and of a trainer that others start."""
ENDING_SECONDS = 20.0  # that processes of a killed controller may take to end


def now() -> float:
    """Seconds since the epoch as they pass in this process: a clock that is set while a run goes on changes nothing."""
    return _BEGAN + time.monotonic()


def write(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Writes or replaces a file of the run as a whole. Raises UserError."""
    try:
        write_durably(path, data, mode)
    except OSError as e:
        raise UserError(f"{path} cannot be written: {e.strerror}; check the disk") from None


def make(folder: Path) -> None:
    """The folder and those above it, where they are missing. Raises UserError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"{folder} cannot be made: {e.strerror}; name another folder") from None


def make_whole(folder: Path, write: Callable[[Path], None]) -> None:
    """Makes a folder with all that `write` puts into it, or not at all; one that is there stays as it is. Of several
    processes one writes, and the others wait. Raises UserError."""
    make(folder.parent)
    try:
        lock = os.open(folder.parent, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.is_dir():
                with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as scratch:
                    made = Path(scratch) / folder.name
                    made.mkdir()
                    write(made)
                    made.rename(folder)
        finally:
            os.close(lock)
    except OSError as e:
        raise UserError(f"{folder} cannot be made: {e.strerror or e}; check the disk and its rights") from None


def check_new(folder: Path) -> None:
    """Raises UserError if the folder exists."""
    if folder.exists():
        raise UserError(
            f"{folder} already holds a run; continue it with `etude train --resume {folder}`, choose another --name, "
            "or delete the folder"
        )


def create(folder: Path, config: RLConfig, toml: str | None) -> None:
    """A new run folder; `toml` is the configuration as given. Both are kept without secrets, readable by their owner
    alone. Raises UserError if the folder exists."""
    check_new(folder)
    partial = folder.with_name(f".{folder.name}.incomplete")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        kept = without_secrets(config).model_dump_json(indent=2) + "\n"
        write_durably(partial / "config.json", kept.encode(), PRIVATE)
        config_changed(partial)
        if toml is not None:
            shown = redacted(toml, config) or "# Not kept: it holds secrets that were not found again in the text.\n"
            write_durably(partial / "config.toml", shown.encode(), PRIVATE)
        os.rename(partial, folder)
    except OSError as e:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(f"the run folder {folder} cannot be written: {e.strerror}") from None


def load_config(folder: Path) -> RLConfig:
    """The resolved configuration of an existing run. Raises UserError if there is none, or it is damaged."""
    path = folder / "config.json"
    if not path.exists():
        raise UserError(f"{folder} holds no run (no config.json); name the folder of a run")
    try:
        values = json.loads(path.read_bytes())
        if not isinstance(values, dict):
            raise ValueError("not an object")
    except (OSError, ValueError, RecursionError) as e:
        raise UserError(f"{path} is damaged ({e}); restore the file, or start a new run") from None
    return validate(RLConfig, values, str(path))


def keep_fleet(folder: Path, fleet: FleetConfig) -> None:
    """Stores the fleet of a run, for its next attempts. Raises UserError."""
    write(folder / "fleet.json", (fleet.model_dump_json(indent=2) + "\n").encode(), PRIVATE)


def load_fleet(folder: Path) -> FleetConfig | None:
    """The fleet of a run; None for a run without one. Raises UserError if it is damaged."""
    path = folder / "fleet.json"
    if not path.exists():
        return None
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError) as e:
        raise UserError(f"{path} is damaged ({e}); give --fleet") from None
    return validate(FleetConfig, values, str(path))


def config_changed(folder: Path) -> bool:
    """Whether config.json has changed since this was asked last: it may be edited between attempts, and who resumes the
    run is told."""
    digest = blake3.blake3((folder / "config.json").read_bytes()).hexdigest().encode()
    path = folder / "config.digest"
    known = path.read_bytes() if path.exists() else b""
    if digest != known:
        write(path, digest, PRIVATE)
    return digest != known


@contextmanager
def lock(folder: Path) -> Iterator[int]:
    """Holds the run for this process; gives the descriptor of the lock, for children that are to hold it as well.
    Raises UserError if another process is running the run, or the disk is full. Children of a controller that was
    killed end at once, and are waited for."""
    deadline = time.monotonic() + ENDING_SECONDS
    with (folder / "lock").open("a+") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                file.seek(0)
                holder = file.read().strip()
                if _lives(holder):
                    why = f"{folder} is being run by another process (pid {holder}); wait for it or choose another name"
                    raise UserError(why) from None
                if time.monotonic() > deadline:
                    why = f"processes of an earlier run still use {folder}; end them (`fuser {folder}/lock` names them)"
                    raise UserError(why) from None
            time.sleep(0.05)
        try:
            file.truncate(0)
            os.write(file.fileno(), f"{os.getpid()}\n".encode())
        except OSError as e:
            raise UserError(f"{folder / 'lock'} cannot be written: {e.strerror}; check the disk") from None
        yield file.fileno()


def is_running(folder: Path) -> bool:
    """Whether a process holds the run."""
    try:
        with (folder / "lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no lock, so nobody has begun
        return False
    return False


def _lives(pid: str) -> bool:
    """Whether a controller that wrote its pid is there; a zombie is not."""
    try:
        state = Path(f"/proc/{int(pid)}/stat").read_text().rpartition(")")[2].split()[0]
    except (ValueError, OSError):
        return False
    return state not in "ZX"


def new_attempt(folder: Path) -> Path:
    """A fresh log folder for this start of the run; `logs/latest` points to it."""
    logs = folder / "logs"
    attempt = logs / f"attempt_{1 + max(map(_number, attempts(folder)), default=0)}"
    attempt.mkdir(parents=True)
    latest = logs / "latest"
    latest.unlink(missing_ok=True)
    latest.symlink_to(attempt.name)
    return attempt


def attempts(folder: Path) -> list[Path]:
    """The log folders of a run's starts, the last one last."""
    return sorted((folder / "logs").glob("attempt_*"), key=_number)


def _number(attempt: Path) -> int:
    return int(attempt.name.removeprefix("attempt_"))


def append_json(path: Path, record: dict[str, Any]) -> None:
    """Appends a line to a file that several processes may append to. It takes the place of a line that a crash or a
    full disk has cut short. Raises UserError."""
    line = json.dumps(record).encode() + b"\n"
    try:
        with path.open("a+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            end = size = os.fstat(file.fileno()).st_size
            while end and os.pread(file.fileno(), 1, end - 1) != b"\n":
                end -= 1
            if end < size:
                os.truncate(file.fileno(), end)
            if file.write(line) < len(line):
                os.truncate(file.fileno(), end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as e:
        raise UserError(f"{path} cannot be written: {e.strerror}; make room on the disk, then --resume") from None


def read_jsonl(path: Path, numbers: Sequence[str] = (), texts: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The complete lines of a JSON-lines file, objects that hold `numbers` and `texts`; a line cut short by a crash is
    left out. Raises UserError if the file is damaged."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    kinds = dict.fromkeys(numbers, (int, float)) | dict.fromkeys(texts, (str,))
    objects: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            raise UserError(f"{path}, line {number}: not JSON; the file is damaged, delete that line") from None
        if not isinstance(value, dict):
            raise UserError(f"{path}, line {number}: not an object; the file is damaged, delete that line")
        for key, kind in kinds.items():
            if isinstance(value.get(key), bool) or not isinstance(value.get(key), kind):
                what = "number" if key in numbers else "text"
                raise UserError(f"{path}, line {number}: not a {what} at {key}; the file is damaged, delete that line")
        objects.append(value)
    return objects


@contextmanager
def timed(path: Path, process: str, state: str) -> Iterator[None]:
    """Appends to the timeline what `process` did while the block ran."""
    start = now()
    try:
        yield
    finally:
        append_json(path, {"process": process, "state": state, "start": start, "end": now()})
