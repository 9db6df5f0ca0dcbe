"""`etude fleet ACTION`: adds engines and players to a run that goes on, shows them, and lets them leave."""

from __future__ import annotations

import argparse
import json
import secrets
import shutil
import signal
import sys
import time
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import httpx2
from rich.console import Console
from rich.table import Table

from etude import runfolder
from etude.cli.overlays import read_toml
from etude.config import FleetConfig, RLConfig, check_fleet, load_toml, validate
from etude.errors import RunFailed, UserError
from etude.fleet import Machine, Placed, kuberay_files, namespace, ray_log, slurm_files
from etude.ledger import ELSEWHERE, Ledger
from etude.protocol import TOKEN_VARIABLE, bearer, own_token
from etude.run.jobs import PlacedFleet, check_reached, place_fleet

_LOOK_SECONDS = 1.0
_ANSWER_SECONDS = 10.0  # of a server, before a fleet is started
_BEGIN_SECONDS = 90.0  # in which a placer says at the latest that there is no room


def add(parser: argparse.ArgumentParser) -> None:
    """Flags of `etude fleet`, one sub-command per action."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def action(name: str, text: str, *words: str) -> argparse.ArgumentParser:
        sub = actions.add_parser(name, help=text, description=text, allow_abbrev=False)
        helps = {
            "fleet": "TOML of a fleet (`etude train --keys fleet`)",
            "run": "folder of a run",
            "config": "its TOML",
        }
        for word in words:
            sub.add_argument("folder" if word == "run" else word, type=Path, metavar=word.upper(), help=helps[word])
        return sub

    action("up", "add a fleet's engines and players to a run that goes on", "fleet", "run")
    status = action("status", "show the engines of a run, and the episodes that are being played", "run")
    status.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    drain = action("drain", "let engines of a run leave: they end their turns or hand them back", "run")
    drain.add_argument("urls", nargs="+", metavar="URL", help="engines, as `etude fleet status` lists them")
    logs = action("logs", "print the log of an engine or a player", "run")
    logs.add_argument("name", help="as `etude fleet status` lists it")
    logs.add_argument("--address", help="HOST:PORT of the head of Ray that has it; default: that of the run's fleet")
    files = action("files", "write the files of a scheduler that starts the fleet and the run", "fleet", "config")
    files.add_argument("--for", dest="scheduler", choices=("slurm", "kuberay"), required=True, help="the scheduler")
    files.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="folder to write them into")
    for kind, most in asdict(Machine()).items():
        text = f"{kind.upper()[:-1]}s of a machine (default: {most})"
        files.add_argument(f"--machine-{kind}", type=int, default=most, metavar="N", help=text)
    files.add_argument("--image", help="kuberay: container image with etude[train,ray]")
    files.add_argument("--claim", help="kuberay: PersistentVolumeClaim that holds the run folder and its inputs")


def run(arguments: argparse.Namespace, _: list[str]) -> int | None:
    """Does the action. Raises UserError or RunFailed."""
    match arguments.action:
        case "up":
            return _up(arguments)
        case "status":
            return _status(arguments.folder, as_json=arguments.json)
        case "drain":
            return _drain(arguments.folder, arguments.urls)
        case "logs":
            return _logs(arguments.folder, arguments.name, arguments.address)
        case _:
            return _files(arguments)


def _fleet_of(path: Path, config: RLConfig) -> FleetConfig:
    fleet = validate(FleetConfig, load_toml(path), str(path))
    check_fleet(fleet, config, str(path))
    return fleet


def _ledger(folder: Path, config: RLConfig) -> Ledger:
    return Ledger.open(config.ledger or f"sqlite:///{folder}/ledger.db", config.name)


def _up(arguments: argparse.Namespace) -> None:
    """Starts a fleet. Jobs of this machine live as long as this process; those of Ray go on."""
    folder = arguments.folder.absolute()
    config = runfolder.load_config(folder)
    fleet = _fleet_of(arguments.fleet, config)
    if fleet.trainer is not None:
        raise UserError(f"{arguments.fleet}: a run that goes on keeps its trainer: drop [trainer]")
    if (folder / "report.json").exists() and not runfolder.is_running(folder):
        raise UserError(
            f"{arguments.folder} has ended: resume it, with --fleet {arguments.fleet} if it is to have these"
        )
    logs = (folder / "logs" / "latest").resolve()  # of this attempt, also while a resumed run has another
    if not logs.exists():
        raise UserError(f"{arguments.folder} has not begun: start its run first")
    if (token := own_token()) is None:
        raise UserError(
            f"set {TOKEN_VARIABLE} to the token that the run was started with, which its engines ask for; if it was "
            "started without one, stop it, and resume it with one"
        )
    _check_servers(fleet, folder, config, token)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        # The names are not those of jobs that the run has already.
        mark = f"-{secrets.token_hex(2)}"
        with closing(place_fleet(fleet, folder, config, logs, token, mark=mark, away=True)) as placed:
            for name in (*placed.engines, *placed.players):
                print(f"{name} starts: `etude fleet logs {arguments.folder} {name}` prints its log", flush=True)
            _join_attached(fleet, folder, config)
            _see_begin(placed)
            _wait(placed.here)
    finally:
        signal.signal(signal.SIGTERM, before)


def _see_begin(placed: PlacedFleet) -> None:
    """Waits until all jobs have begun. Raises UserError, once all are stopped, if one finds no room."""
    jobs, deadline = [*placed.engines.values(), *placed.players.values()], time.monotonic() + _BEGIN_SECONDS
    while time.monotonic() < deadline and not all(job.begun or job.exit_code is not None for job in jobs):
        if why := next((job.waits for job in jobs if job.waits), ""):
            placed.stop()
            raise UserError(f"{why}: lower cpus, gpus or count, or add nodes")
        time.sleep(_LOOK_SECONDS)


def _check_servers(fleet: FleetConfig, folder: Path, config: RLConfig, token: str) -> None:
    """Raises UserError for attached servers that do not answer or that players in Ray do not reach, and for another
    token than that of the run's engines, of which one that answers is asked."""
    attached = [url for table in fleet.engines for url in table.urls]
    if wrong := next((url for url in attached if _answer(url, token) is None), None):
        raise UserError(f"{wrong} does not answer: start the server, or mend urls")
    with closing(_ledger(folder, config)) as ledger:
        engines = [row for row in ledger.members.engines() if row.state != "gone"]
    serving = [row.url for row in engines if row.state == "serving"]
    own = runfolder.load_fleet(folder)
    if any(each and each.players and each.players.placer == "ray" for each in (fleet, own)):
        check_reached([*attached, *(row.url for row in engines)])
    code = next((code for url in serving if (code := _answer(url, token)) is not None), None)
    if code in (401, 403):
        raise UserError(f"${TOKEN_VARIABLE} is not the token that the run was started with: its engines refuse it")


def _answer(url: str, token: str) -> int | None:
    """The status of a server's answer; None without one."""
    try:
        return httpx2.get(f"{url}/health", timeout=_ANSWER_SECONDS, trust_env=False, headers=bearer(token)).status_code
    except httpx2.HTTPError:
        return None


def _join_attached(fleet: FleetConfig, folder: Path, config: RLConfig) -> None:
    attached = [(url, f"{table.name}-{number}") for table in fleet.engines for number, url in enumerate(table.urls)]
    if attached:
        with closing(_ledger(folder, config)) as ledger:
            for url, name in attached:
                ledger.members.join(url, name)


def _wait(jobs: list[Placed]) -> None:
    """Returns when all jobs have ended. Raises RunFailed if one has failed."""
    failed = list[str]()
    left = list(jobs)
    while left:
        for job in [job for job in left if job.ends(_LOOK_SECONDS / len(left))]:
            left.remove(job)
            failed += [why] if (why := job.failure()) else []
    if failed:
        raise RunFailed("; ".join(failed))


def _status(run: Path, *, as_json: bool) -> None:
    config = runfolder.load_config(run)
    with closing(_ledger(run, config)) as ledger:
        engines, players = ledger.members.engines(), ledger.members.players()
        resting = {row.owner: row.why for row in ledger.members.offers() if row.why}
    if as_json:
        rows = [asdict(row) for row in engines]
        return print(json.dumps({"engines": rows, "players": players, "resting": resting}))
    table = Table("name", "url", "state", "version", "why", box=None)
    for row in engines:
        version = str(row.version) if row.version >= 0 else ""
        table.add_row(row.name, row.url, row.state, version, row.why or row.leaving)
    Console(width=max(100, shutil.get_terminal_size().columns)).print(table)
    if not engines:
        print("no engine has joined yet")
    for owner, count in players.items():
        print(f"{_name(owner)} plays {count} episode{'s' if count > 1 else ''}")
    for owner, why in resting.items():
        print(f"{_name(owner)} rests: {why}")
    if not runfolder.is_running(run):
        print(f"{run} does not run: it ended like this, or was killed")


def _name(owner: str) -> str:
    """The name of a player, as that of its log, without that of this start."""
    return owner.removeprefix(ELSEWHERE).partition(".")[0]


def _drain(run: Path, urls: list[str]) -> None:
    config = runfolder.load_config(run)
    with closing(_ledger(run, config)) as ledger:
        there = {row.url for row in ledger.members.engines() if row.state != "gone"}
        if wrong := [url for url in urls if url.rstrip("/") not in there]:
            raise UserError(f"{run} has no engine {wrong[0]}: `etude fleet status {run}` lists them")
        for url in urls:
            ledger.members.drain(url.rstrip("/"), "asked by `etude fleet drain`")
            print(f"{url} gets no new turns, and ends")


def _logs(run: Path, name: str, address: str | None) -> None:
    """Prints a log: of this machine's file, which the placer of the run keeps as well, else of the cluster. One that
    joined an earlier attempt has its log there."""
    runfolder.load_config(run)
    logs = {log.stem: log for attempt in runfolder.attempts(run) for log in attempt.glob("*.log")}
    if address is None and name in logs:
        with logs[name].open(errors="replace") as file:
            return shutil.copyfileobj(file, sys.stdout)
    fleet = runfolder.load_fleet(run)
    if address is None and fleet is not None:
        address = next(iter(fleet.addresses), None)
    if address is None:
        there = ", ".join(sorted(logs)) or "none"
        raise UserError(
            f"{run} has no log of {name!r}, only {there}: name one, or the --address of the head that has it"
        )
    for piece in ray_log(address, namespace(run), name):
        sys.stdout.write(piece)


def _files(arguments: argparse.Namespace) -> None:
    config = validate(RLConfig, read_toml(arguments.config), str(arguments.config))
    fleet = _fleet_of(arguments.fleet, config)
    machine = Machine(arguments.machine_cpus, arguments.machine_gpus)
    if min(asdict(machine).values()) < 1:
        raise UserError("--machine-cpus and --machine-gpus are numbers from 1 on")
    options = {"--image": arguments.image, "--claim": arguments.claim}
    if arguments.scheduler == "slurm":
        if wrong := [flag for flag, value in options.items() if value is not None]:
            raise UserError(f"{wrong[0]} is for --for kuberay: drop it")
        paths = str(arguments.config.absolute()), str(arguments.fleet.absolute())
        files = slurm_files(fleet, config, paths, machine)
    else:
        if lacking := [flag for flag, value in options.items() if value is None]:
            raise UserError(f"--for kuberay needs {lacking[0]}")
        texts = {"run.toml": arguments.config.read_text(), "fleet.toml": arguments.fleet.read_text()}
        files = kuberay_files(fleet, config, texts, image=arguments.image, claim=arguments.claim, machine=machine)
    runfolder.make(arguments.output)
    for name, text in files.items():
        runfolder.write(arguments.output / name, text.encode())
        print(arguments.output / name)
