"""Exact-resume checkpoints: `checkpoints/step_N/`, written by any number of ranks and read by any other number.

    step_N/rank_R.safetensors    a range of rows (of the first dimension) of each tensor
    step_N/manifest.json         the files with their BLAKE3 digests and rows, and the digest of the manifest

Every rank writes its file. Rank 0 waits for the others', syncs all to the disk, writes the manifest, and renames the
folder to `step_N`. So a checkpoint is complete or absent, and every loaded bit equals the saved one. A
`CheckpointWriter` writes on a thread of its own, while the gradients of the next step are computed.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

import blake3
import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from etude.errors import RunFailed, UserError
from etude.failpoints import failpoint
from etude.records import Record
from etude.store import sync, write_durably
from etude.weights.ranks import Ranks, Shard

Take = Callable[[str, int], range]
RANK_SECONDS = 1800.0  # rank 0's wait for the files of the others
WRITE_SECONDS = 3600.0  # the wait for a checkpoint
_TRIES = 2  # consecutive failures that end the run
_FORMAT = 1


class CheckpointDamaged(UserError):
    """A checkpoint is missing, or differs from the saved one."""


class _RowRange(Record, frozen=True, kw_only=True):
    first: int
    count: int
    total: int


class _RankFile(Record, frozen=True, kw_only=True):
    """The file of one rank."""

    digest: str
    rows: dict[str, _RowRange]  # by tensor


class _CheckpointManifest(Record, frozen=True, kw_only=True):
    format: int = _FORMAT
    version: int
    about: dict[str, str]
    files: tuple[_RankFile, ...]  # by rank


class _CheckpointManifestFile(Record, frozen=True, kw_only=True):
    digest: str
    manifest: msgspec.Raw


def parts_of(tensors: Mapping[str, Tensor | Shard], rank: int = 0, count: int = 1) -> dict[str, Shard]:
    """The rows that a rank writes: those of shards, and its part of whole tensors; rank 0 writes tensors without
    dimensions."""
    parts: dict[str, Shard] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, Shard):
            if tensor.rows.numel():
                parts[name] = tensor
            continue
        if tensor.is_meta:  # another rank has it
            continue
        total = tensor.shape[0] if tensor.ndim else 1
        own = rows_of(total, rank, count)
        if own:
            parts[name] = Shard(tensor[own.start : own.stop] if tensor.ndim else tensor, own.start, total)
    return parts


def every_row(name: str, total: int) -> range:
    """The default of `load`: all rows of a tensor."""
    return range(total)


def rows_of(total: int, rank: int, count: int) -> range:
    """The rows of a rank: consecutive, ceil(total / count) each while rows remain, which is the division of the first
    dimension in FSDP2 and `torch.chunk`."""
    each = -(-total // count)
    return range(min(rank * each, total), min((rank + 1) * each, total))


def write(folder: Path, version: int, parts: Mapping[str, Shard], ranks: Ranks, about: Mapping[str, str]) -> None:
    """Writes this rank's file of a checkpoint, and on rank 0 completes the checkpoint. Each row of each tensor belongs
    to one rank. `about` are further facts, which `load` returns. Raises UserError if the disk is full, RunFailed if
    another rank's file is missing after half an hour."""
    partial, final = folder / f"step_{version}.{ranks.session}.incomplete", _path(folder, version)
    try:
        partial.mkdir(parents=True, exist_ok=True)
        file = partial / _name(ranks.rank)
        save_file({name: part.rows.contiguous() for name, part in parts.items()}, file)
        sync(file)
        own = _RankFile(digest=_digest(file), rows={name: _range_of(part) for name, part in parts.items()})
        failpoint("checkpoint.file")
        if ranks.rank:
            write_durably(partial / _announcement(ranks.rank), msgspec.json.encode(own))
            return
        files = (own, *_gather(partial, version, ranks))
        body = msgspec.json.encode(_CheckpointManifest(version=version, about=dict(about), files=files))
        whole = _CheckpointManifestFile(digest=blake3.blake3(body).hexdigest(), manifest=msgspec.Raw(body))
        write_durably(partial / "manifest.json", msgspec.json.encode(whole))
        failpoint("checkpoint.manifest")
        # An existing checkpoint of this number is damaged: the run resumed from an earlier one.
        shutil.rmtree(final, ignore_errors=True)
        os.rename(partial, final)
        sync(folder)
        failpoint("checkpoint.complete")
    except (OSError, SafetensorError) as e:
        if ranks.rank:
            with suppress(OSError):  # rank 0 then waits for it in vain
                _failure(partial, ranks.rank).touch()
        else:
            shutil.rmtree(partial, ignore_errors=True)
        why = (e.strerror if isinstance(e, OSError) else None) or str(e)
        needed = sum(part.rows.nbytes for part in parts.values()) / 1e6
        raise UserError(
            f"checkpoint {version} cannot be written to {folder}: {why}; it takes {needed:,.1f} MB beside those that "
            "are kept"
        ) from None


def load(folder: Path, version: int, take: Take = every_row) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The rows of each tensor that `take` selects by name and number of rows, without tensors that have none, and the
    facts in `about`. Raises CheckpointDamaged if a file with one of these rows is missing or its bytes have changed."""
    path = _path(folder, version)
    manifest = _read_manifest(path, version)
    own = {name: take(name, rows.total) for file in manifest.files for name, rows in file.rows.items()}
    parts: dict[str, list[tuple[int, Tensor]]] = {name: [] for name, rows in own.items() if rows}
    for rank, file in enumerate(manifest.files):
        wanted = {name: rows for name, held in file.rows.items() if (rows := _overlap(held, own[name]))}
        if not wanted:
            continue
        _check(path / _name(rank), file.digest, version)
        with safe_open(path / _name(rank), "pt") as stored:
            for name, rows in wanted.items():
                held = file.rows[name]
                part = slice(rows.start - held.first, rows.stop - held.first)
                all_of_it = len(rows) == held.count
                parts[name].append((rows.start, stored.get_tensor(name) if all_of_it else stored.get_slice(name)[part]))
    missing = f"checkpoint {version} is damaged ({path} does not have each row of a tensor once)"
    return {name: _joined(pieces, own[name], missing) for name, pieces in parts.items()}, manifest.about


def load_newest(
    folder: Path, take: Take = every_row, agreed: Callable[[str], str] = lambda damage: damage
) -> tuple[int, dict[str, Tensor], dict[str, str]] | None:
    """The newest complete checkpoint: its number and the result of `load`; None if there was never a checkpoint. Prints
    why a newer one is not used. `agreed` gets a rank's sentence about damage, "" without any, and returns that of any
    rank. Raises UserError if none is complete."""
    damage: CheckpointDamaged | None = None
    for version in reversed(versions(folder)):
        tensors, about, why = dict[str, Tensor](), dict[str, str](), ""
        try:
            tensors, about = load(folder, version, take)
        except CheckpointDamaged as e:
            why = str(e)
        if why := agreed(why):
            damage = damage or CheckpointDamaged(why)
            continue
        if damage is not None:
            print(f"note: {damage}; the run goes on from checkpoint {version}", file=sys.stderr, flush=True)
        return version, tensors, about
    if damage is not None:
        raise UserError(f"{damage}, and no older one is whole; restore one from a copy, or start a new run")
    return None


def versions(folder: Path) -> list[int]:
    """The versions that have a checkpoint, ascending."""
    names = [p.name.removeprefix("step_") for p in folder.glob("step_*")]
    return sorted(int(name) for name in names if name.isdigit())


def prune(folder: Path, keep: int, protect: Collection[int] = ()) -> None:
    """Deletes all checkpoints except the newest `keep` and those in `protect`."""
    drop(folder, [old for old in versions(folder)[:-keep] if old not in protect])


def drop(folder: Path, versions: Collection[int]) -> None:
    """Deletes these checkpoints."""
    for version in versions:
        shutil.rmtree(_path(folder, version))


def drop_after(folder: Path, version: int) -> None:
    """Deletes checkpoints of later versions, which were never published, and leftovers of killed writers."""
    drop(folder, [later for later in versions(folder) if later > version])
    for partial in folder.glob("step_*.incomplete"):
        shutil.rmtree(partial)


class CheckpointWriter:
    """Keeps the newest `keep` checkpoints in `folder`. One is written at a time: `start` waits for the previous one. A
    failure is reported at once and the run goes on, since it can resume from an earlier checkpoint; a second
    consecutive failure is raised. Tensors on the host are written from where they are: `wait` before they change. Host
    memory: one copy of the tensors on a device, reused by the next checkpoint."""

    def __init__(self, folder: Path, keep: int, ranks: Ranks | None = None):
        self._folder, self._keep = folder, keep
        self._ranks = ranks or Ranks(0, 1, token_hex(8))
        self._copies: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None  # of the last checkpoint; None: it was written
        self._failures = 0  # consecutive
        self.started = -1  # version of the newest begun checkpoint

    def start(
        self,
        version: int,
        parts: Mapping[str, Shard],
        protect: Collection[int] = (),
        about: Mapping[str, str] | None = None,
    ) -> None:
        """Begins to write this rank's part of a checkpoint. Checkpoints in `protect` are not deleted for it. Raises
        UserError after two consecutive failures, RunFailed after an hour."""
        self.wait()
        if self._error is not None and (self._failures >= _TRIES or not isinstance(self._error, UserError)):
            raise self._error
        arguments = (version, self._on_host(parts), frozenset(protect), dict(about or {}))
        self.started = version
        # A daemon: if the process ends, the folder never gets its final name.
        self._thread = threading.Thread(target=self._write, args=arguments, name=f"checkpoint-{version}", daemon=True)
        self._thread.start()

    @property
    def failed(self) -> bool:
        """Whether the last ended checkpoint could not be written."""
        return self._error is not None

    def wait(self) -> float:
        """Waits until none is being written. Returns the seconds of the wait. Raises RunFailed after an hour."""
        began = time.monotonic()
        if self._thread is not None:
            self._thread.join(WRITE_SECONDS)
            if self._thread.is_alive():
                raise RunFailed(
                    f"checkpoint {self.started} was not written to {self._folder} within an hour; check the disk and "
                    "resume"
                )
        return time.monotonic() - began

    def close(self) -> None:
        """Waits for the last checkpoint, and raises its error."""
        self.wait()
        if self._error is not None:
            raise self._error

    def _on_host(self, parts: Mapping[str, Shard]) -> dict[str, Shard]:
        copies: dict[str, Tensor] = {}
        for name, part in parts.items():
            if part.rows.device.type == "cpu":
                continue
            rows, old = part.rows.detach(), self._copies.get(name)
            fits = old is not None and old.shape == rows.shape and old.dtype == rows.dtype
            # Not pinned: PyTorch rounds pinned memory up to a power of two.
            copy = old if old is not None and fits else torch.empty(rows.shape, dtype=rows.dtype)
            copies[name] = copy.copy_(rows)
        self._copies = copies
        return {n: Shard(copies.get(n, part.rows.detach()), part.first, part.total) for n, part in parts.items()}

    def _write(self, version: int, parts: dict[str, Shard], protect: frozenset[int], about: dict[str, str]) -> None:
        try:
            write(self._folder, version, parts, self._ranks, about)
            if self._ranks.rank == 0:
                prune(self._folder, self._keep, protect)
        except BaseException as e:  # `start` or `close` raises it
            self._error, self._failures = e, self._failures + 1
            if isinstance(e, UserError) and self._failures < _TRIES:
                print(f"note: {e}; the run goes on and tries again", file=sys.stderr, flush=True)
        else:
            self._error, self._failures = None, 0


def _failure(partial: Path, rank: int) -> Path:
    """The file that says that a rank could not write its own."""
    return partial / f"rank_{rank}.failed"


def _gather(partial: Path, version: int, ranks: Ranks) -> list[_RankFile]:
    """The announcements of the other ranks, in order; deletes them."""
    deadline = time.monotonic() + RANK_SECONDS
    files: list[_RankFile] = []
    for rank in range(1, ranks.count):
        path = partial / _announcement(rank)
        while not path.exists():
            if _failure(partial, rank).exists():
                raise UserError(f"checkpoint {version} cannot be written: rank {rank} could not; see its log")
            if time.monotonic() > deadline:
                raise RunFailed(f"rank {rank} did not write its file of checkpoint {version}; start the trainer again")
            time.sleep(0.02)
        files.append(msgspec.json.decode(path.read_bytes(), type=_RankFile))
        path.unlink()
    return files


def _read_manifest(path: Path, version: int) -> _CheckpointManifest:
    try:
        data = (path / "manifest.json").read_bytes()
        file = msgspec.json.decode(data, type=_CheckpointManifestFile)
        manifest = msgspec.json.decode(file.manifest, type=_CheckpointManifest)
    except FileNotFoundError:
        raise CheckpointDamaged(f"checkpoint {version} is missing ({path})") from None
    except OSError as e:
        raise CheckpointDamaged(f"checkpoint {version} cannot be read ({path}: {e.strerror})") from None
    except msgspec.MsgspecError as e:
        raise CheckpointDamaged(f"checkpoint {version} is damaged ({path / 'manifest.json'}: {e})") from None
    if blake3.blake3(bytes(file.manifest)).hexdigest() != file.digest or manifest.version != version:
        raise CheckpointDamaged(f"checkpoint {version} is damaged ({path / 'manifest.json'} is not as it was written)")
    if manifest.format != _FORMAT:
        raise CheckpointDamaged(f"checkpoint {version} has format {manifest.format}, not {_FORMAT} ({path})")
    return manifest


def _check(path: Path, digest: str, version: int) -> None:
    try:
        actual = _digest(path)
    except FileNotFoundError:
        raise CheckpointDamaged(f"checkpoint {version} is damaged ({path} is missing)") from None
    except OSError as e:
        raise CheckpointDamaged(f"checkpoint {version} cannot be read ({path}: {e.strerror})") from None
    if actual != digest:
        raise CheckpointDamaged(f"checkpoint {version} is damaged ({path} does not have the digest of its manifest)")


def _joined(pieces: list[tuple[int, Tensor]], own: range, missing: str) -> Tensor:
    """The rows `own` of a tensor. Raises CheckpointDamaged unless each occurs once."""
    pieces.sort(key=lambda piece: piece[0])
    row = own.start
    for first, rows in pieces:
        if first != row:
            raise CheckpointDamaged(missing)
        row += rows.shape[0] if rows.ndim else 1
    if row != own.stop:
        raise CheckpointDamaged(missing)
    return pieces[0][1] if len(pieces) == 1 else torch.cat([rows for _, rows in pieces])


def _range_of(part: Shard) -> _RowRange:
    return _RowRange(first=part.first, count=part.rows.shape[0] if part.rows.ndim else 1, total=part.total)


def _overlap(rows: _RowRange, own: range) -> range:
    return range(max(rows.first, own.start), min(rows.first + rows.count, own.stop))


def _digest(path: Path) -> str:
    return blake3.blake3(max_threads=blake3.blake3.AUTO).update_mmap(path).hexdigest()


def _name(rank: int) -> str:
    return f"rank_{rank}.safetensors"


def _announcement(rank: int) -> str:
    return f"rank_{rank}.json"


def _path(folder: Path, version: int) -> Path:
    return folder / f"step_{version}"
