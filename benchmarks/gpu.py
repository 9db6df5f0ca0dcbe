"""`make gpu`: what waits for a GPU, as two commands that are given apart.

    python -m benchmarks.gpu parts     under eight minutes: kernels, trainer and engine, in one process, without a disk
    python -m benchmarks.gpu run       under four: whole runs of `etude train`, in their own processes

    [--steps NAME,...] [--device DEVICE] [--small] [--out DIR] [--wheels DIR] [--seconds N] [--dry-run]

Every step appends a line to DIR/gpu.jsonl at once: {"command", "step", "status", "seconds", "figures", "why"}. A step
that ends by a signal, or that stands still, costs itself alone: this process goes on with the next one in a new one.
Steps that no longer fit the command's time are "skipped"; what is missing (a GPU, a package, a C compiler, vLLM) makes
a step "absent", and neither is a failure. Nothing needs the network, and this file itself no package. `--wheels` is a
folder of wheels that go before the packages of this Python (`make gpu-wheels`). `--device cpu --small` runs on any
machine all but the steps that a GPU alone can do. DIR is $OUT, else outputs/gpu.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import re
import select
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
GRACE = 15.0  # seconds between a step's deadline, at which it is interrupted, and its end
ELSEWHERE = 5.0  # times as long for steps and command on a device that is no GPU


@dataclass(frozen=True)
class Step:
    """A step: its function's name with hyphens, and seconds that it has. `real_gpu`: no other device will do."""

    name: str
    seconds: float
    real_gpu: bool = False
    vllm: bool = False


@dataclass(frozen=True)
class Command:
    """A module with functions (setting, figures), their names in order of value, and the seconds of all."""

    module: str
    seconds: float
    steps: tuple[Step, ...]


COMMANDS = {
    "parts": Command("benchmarks.gpu_parts", 455.0, (
        Step("versions", 30), Step("digests", 90), Step("flex", 75, real_gpu=True), Step("merged-bits", 30),
        Step("publish-follow", 90), Step("model", 75), Step("exact", 60), Step("rows", 60), Step("packed", 60),
        Step("streaming", 60), Step("update", 45), Step("activations", 75), Step("engine-exact", 60),
        Step("engine-1", 30), Step("engine-16", 30), Step("engine-64", 40), Step("engine-64-one-long", 60),
        Step("sampling", 40), Step("k2", 30), Step("head", 30),
    )),
    "run": Command("benchmarks.gpu_run", 218.0, (
        Step("versions", 30), Step("folder", 90), Step("rl-adapters", 100), Step("resume", 100), Step("swap", 45),
        Step("smollm2", 60), Step("sft", 75), Step("smollm2-rl", 90), Step("deterministic", 120),
        Step("rl-vllm", 150, real_gpu=True, vllm=True),
    )),
}  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """Where a step runs: a PyTorch device, with models of real size or, for a try of the script, of a small one."""

    device: str
    small: bool
    out: Path
    wheels: Path | None = None

    @property
    def patience(self) -> float:
        """Times the seconds of steps and commands."""
        return 1.0 if self.on_gpu else ELSEWHERE

    @property
    def on_gpu(self) -> bool:
        """Whether the device is one of CUDA."""
        return self.device.startswith("cuda")


class Late(BaseException):
    """A step has had its seconds; nothing that catches errors may go on."""


def machine(setting: Setting) -> dict[str, Any]:
    """What is there; "" for what is not."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    figures: dict[str, Any] = {
        "python": platform.python_version(), "cores": len(os.sched_getaffinity(0)), "gib": round(pages / 2**30, 1),
        "compiler": compiler(), "torch": version("torch"), "transformers": version("transformers"),
        "triton": version("triton"), "vllm": vllm(), "packages_missing": packages_missing(),
        "packages_of_those_missing": packages_of_those_missing(), "packages_older": packages_older(),
        "refused": refused(),
    }  # fmt: skip
    if figures["torch"] and setting.on_gpu:
        import torch

        figures["cuda"] = torch.version.cuda or ""
        if torch.cuda.is_available():
            properties = torch.cuda.get_device_properties(setting.device)
            figures |= {"gpu": properties.name, "gpu_gib": round(properties.total_memory / 2**30, 1)}
    return figures


def missing(step: Step, setting: Setting) -> str:
    """Why a step cannot run here; empty if it can, as far as is known before it starts."""
    if step.name == "versions":
        return ""
    if packages := packages_missing():
        return f"{len(packages)} packages are not installed: {', '.join(packages[:3])}{', ...' * (len(packages) > 3)}"
    if older := refused():
        return f"{older}: bring a newer wheel (make gpu-wheels)"
    if step.real_gpu and not setting.on_gpu:
        return f"{setting.device} is no GPU"
    if setting.on_gpu and not _cuda_is_available():
        return "no GPU that PyTorch can use"
    if setting.on_gpu and not version("triton"):
        return "Triton is not installed"
    if setting.on_gpu and not compiler():
        return "no C compiler, which Triton needs"
    return "vLLM is not installed" if step.vllm and not vllm() else ""


def packages_missing() -> list[str]:
    """What etude[train] needs and is not installed beside this Python."""
    return [name for name in _wanted() if not version(name)]


def packages_of_those_missing() -> list[str]:
    """What packages of etude[train], and theirs in turn, ask for and is not installed; torch's own apart, which a
    system may have in other ways. The steps run nevertheless."""
    seen, ahead = set[str](), [name for name in _wanted() if name != "torch" and version(name)]
    while ahead:
        for line in importlib.metadata.requires(ahead.pop()) or []:
            name, _, marker = line.partition(";")
            found = re.match(r"[\w.-]+", name)
            if found and not marker and found[0] not in {*seen, "torch"}:
                seen.add(found[0])
                ahead += [found[0]] if version(found[0]) else []
    return sorted(name for name in seen if not version(name))


def packages_older() -> list[str]:
    """What is installed, but older than etude[train] asks for; the steps run nevertheless, unless it is `refused`."""
    return [f"{name} {version(name)} < {least}" for name, least in _wanted().items() if _older(version(name), least)]


def refused() -> str:
    """A package that is too old to try: an older transformers has other experts, so that its mixtures of experts
    fail; empty if there is none."""
    there, least = version("transformers"), _wanted()["transformers"]
    return f"transformers {there} < {least}" if _older(there, least) else ""


def _older(there: str, least: str) -> bool:
    """Whether a version is older, by its numbers alone; not where one is unknown."""
    numbers = [[int(n) for n in re.findall(r"\d+", text.partition("+")[0])[:3]] for text in (there, least)]
    return bool(there and least) and numbers[0] < numbers[1]


@cache
def _wanted() -> dict[str, str]:
    """The packages of etude[train], and the least version of each."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines, wanted = [*project["dependencies"], "etude[train]"], dict[str, str]()
    for line in lines:
        if more := re.match(r"etude\[(\w+)\]", line):
            lines += project["optional-dependencies"][more[1]]
            continue
        name, _, least = line.partition(">=")
        wanted[name] = least
    return wanted


def _cuda_is_available() -> bool:
    import torch

    return torch.cuda.is_available()


def compiler() -> str:
    """The C compiler that Triton finds; empty without one."""
    return os.environ.get("CC") or shutil.which("clang") or shutil.which("gcc") or ""


def version(package: str) -> str:
    """Of an installed package; empty without it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def vllm() -> str:
    """The version of the vLLM that ETUDE_VLLM_PYTHON names, or of the one beside this Python; empty without one."""
    python = os.environ.get("ETUDE_VLLM_PYTHON")
    if not python:
        return version("vllm")
    code = "import importlib.metadata as m; print(m.version('vllm'))"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def unpacked(setting: Setting) -> Path | None:
    """The folder of the brought wheels' files, without those of other Pythons; a wheel is an archive of what is
    imported, so no installer is needed."""
    if setting.wheels is None:
        return None
    folder = setting.out / "packages"
    shutil.rmtree(folder, ignore_errors=True)
    own = f"cp{sys.version_info.major}{sys.version_info.minor}"
    for wheel in sorted(setting.wheels.glob("*.whl")):
        python, abi = wheel.stem.split("-")[-3:-1]
        if own in python.split(".") or "py3" in python.split(".") or abi == "abi3":
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)
    return folder


def environment(packages: Path | None = None) -> dict[str, str]:
    """Without the network, and with the vLLM beside this Python unless another is named."""
    before = [str(packages)] if packages else []
    paths = [*before, str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"ETUDE_VLLM_PYTHON": sys.executable, **os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
            "PYTHONPATH": os.pathsep.join(paths)}  # fmt: skip


# In the process of the steps --------------------------------------------------------------------------------------


def inside(command: Command, steps: list[Step], setting: Setting, events: int, end: float) -> None:
    """Runs steps, and writes two lines of JSON for each to the descriptor `events`: its deadline, and its result. Ends
    early after an error that a CUDA process does not survive."""
    parent = os.getppid()

    def tell(event: dict[str, Any]) -> None:
        os.write(events, (json.dumps(event) + "\n").encode())

    def late(*_: object) -> None:
        raise Late

    signal.signal(signal.SIGALRM, late)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    for step in steps:
        room = end - time.monotonic()
        if os.getppid() != parent:
            return
        if room < step.seconds * setting.patience / 2:
            tell({"step": step.name, "status": "skipped", "why": f"{max(room, 0):.0f} s are left", "seconds": 0.0})
            continue
        seconds = min(step.seconds * setting.patience, room)
        tell({"step": step.name, "deadline": seconds})
        result = _tried(command, step, setting, seconds)
        tell(result)
        if re.search(r"CUDA error|device-side assert|AcceleratorError|illegal memory", str(result.get("why"))):
            return


def _tried(command: Command, step: Step, setting: Setting, seconds: float) -> dict[str, Any]:
    begun, figures, why = time.perf_counter(), dict[str, Any](), missing(step, setting)
    status = "absent" if why else "ok"
    if not why:
        signal.setitimer(signal.ITIMER_REAL, seconds, 5.0)
        try:
            if step.name == "versions":
                figures |= machine(setting)
            else:
                module = importlib.import_module(command.module)
                getattr(module, step.name.replace("-", "_"))(setting, figures)
        except Late:
            status, why = "late", f"more than {seconds:.0f} s"
        except Exception as e:
            status, why = "failed", f"{type(e).__name__}: {e}"[-1500:]
        signal.setitimer(signal.ITIMER_REAL, 0)
        if status != "ok":
            with suppress(Exception):
                module.clean()
    return {"step": step.name, "status": status, "seconds": round(time.perf_counter() - begun, 1),
            "figures": {name: _short(value) for name, value in figures.items()}, "why": why}  # fmt: skip


def _short(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


# In the command's process -----------------------------------------------------------------------------------------


class Lines:
    """The file of results."""

    def __init__(self, command: str, out: Path) -> None:
        self._command, self._path, self.failed = command, out / "gpu.jsonl", False

    def add(self, result: dict[str, Any]) -> None:
        """Writes and prints a line at once."""
        result = {"command": self._command, "figures": {}, **result}
        with self._path.open("a") as file:
            file.write(json.dumps(result) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.failed |= result["status"] in ("failed", "late")
        told = " ".join(filter(None, [result["why"], json.dumps(result["figures"]) if result["figures"] else ""]))
        print(f"{result['step']:19} {result['status']:8} {result['seconds']:6.1f} s  {told}", flush=True)


def supervised(name: str, steps: list[Step], setting: Setting, seconds: float) -> bool:
    """Runs the steps in a process, and in a new one after each that ends it or stands still. Whether none failed."""
    lines, end, packages = Lines(name, setting.out), time.monotonic() + seconds, unpacked(setting)
    while steps:
        read, write = os.pipe()
        words = ["--inside", str(write), "--end", str(end), "--device", setting.device, "--out", str(setting.out)]
        words += ["--steps", ",".join(step.name for step in steps), *(["--small"] if setting.small else [])]
        words += ["--wheels", str(setting.wheels)] if setting.wheels else []
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu", name, *words],
            cwd=ROOT, env=environment(packages), pass_fds=[write], start_new_session=True,
        )  # fmt: skip
        os.close(write)
        try:
            done = _followed(read, lines.add, end, steps[0].name)
        finally:
            ended = _ended(process)
            os.close(read)
        if done.running:
            why = done.why or f"its process ended with {ended}"
            lines.add({"step": done.running, "status": "late" if done.why else "failed", "why": why,
                       "seconds": round(time.monotonic() - done.begun, 1)})  # fmt: skip
        over = {*done.over, done.running}
        steps = [step for step in steps if step.name not in over]
    return not lines.failed


def _ended(process: subprocess.Popen[bytes]) -> int:
    """The status of a process that is asked to end, so that it ends the runs it has begun, and is then killed."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(0.5)
    with suppress(subprocess.TimeoutExpired):
        process.terminate()
        process.wait(3.0)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


@dataclass
class Followed:
    """The steps that a process has told the results of, the one that it left, when that began, and why it was left."""

    over: list[str]
    running: str
    begun: float
    why: str = ""


def _followed(read: int, add: Callable[[dict[str, Any]], None], end: float, first: str) -> Followed:
    """Reads what a process tells until its end, or until a step stands still."""
    done, text = Followed([], first, time.monotonic()), b""
    deadline = min(done.begun + 90.0, end + GRACE)  # of the start
    while True:
        ready, _, _ = select.select([read], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            done.why = f"it stood still; killed after {time.monotonic() - done.begun:.0f} s"
            return done
        if not (more := os.read(read, 65_536)):
            return done
        *whole, text = (text + more).split(b"\n")
        for line in whole:
            event = json.loads(line)
            if "deadline" in event:
                done.running, done.begun = event["step"], time.monotonic()
                deadline = done.begun + event["deadline"] + GRACE
            else:
                add(event)
                done.over.append(event["step"])
                done.running, deadline = "", time.monotonic() + GRACE


def main() -> int:
    """Runs a command; 1 if one of its steps failed."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu")
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or "outputs/gpu"))
    parser.add_argument("--steps", help="names, separated by commas")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="small models: a try of the script")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels that go before the packages of this Python")
    parser.add_argument("--seconds", type=float, help="of the command; steps that no longer fit are skipped")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--inside", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--end", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    command = COMMANDS[arguments.command]
    known = {step.name: step for step in command.steps}
    names = arguments.steps.split(",") if arguments.steps else list(known)
    if unknown := [name for name in names if name not in known]:
        print(f"{arguments.command} has no step {unknown[0]}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    steps = [known[name] for name in names]
    wheels = arguments.wheels.resolve() if arguments.wheels else None
    setting = Setting(arguments.device, arguments.small, arguments.out.resolve(), wheels)
    if arguments.dry_run:
        sys.path[:0] = [str(folder) for folder in [unpacked(setting)] if folder]
        for step in steps:
            why = missing(step, setting)
            print(f"{step.name:19} {'absent: ' + why if why else 'can run'}")
        return 0
    setting.out.mkdir(parents=True, exist_ok=True)
    if arguments.inside is not None:
        inside(command, steps, setting, arguments.inside, arguments.end)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    return int(
        not supervised(arguments.command, steps, setting, arguments.seconds or command.seconds * setting.patience)
    )


if __name__ == "__main__":
    sys.exit(main())
