"""`make install-check`: etude as users install the wheel, and the commands of README that each extra brings.

Each row of the table is a Python, a user and an extra: a fresh virtual environment with the wheel of this checkout, in
an empty folder of a user other than root; for the core also of root. `PYTHONS=` names interpreters (else the system's,
and the newest that is found), `EXTRAS=` the rows (else all). Extras that bring PyTorch are checked with the Python
version of this environment alone, for which a build of it can be had.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
TORCH = "torch==2.13.0"
MAX_MB = 150  # of the core's files, without pip and without the bytecode that Python writes beside them
HEAVY = ("torch", "transformers", "numba", "tokenizers", "cryptography")
NOBODY = 65534
SECONDS = 1200  # that one command may take


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


ENGINE, GATEWAY = _free_port(), _free_port()
LIVE = f"""
folder = "live"
gateway.port = {GATEWAY}
[[clusters]]
name = "main"
urls = ["http://127.0.0.1:{ENGINE}"]
store = "weights"
"""
RENDER = (
    "from etude.config import find_model; from etude.renderers import renderer_for; "
    "r = renderer_for(find_model('nano')); assert r.prompt([{'role': 'user', 'content': 'Hello'}], [])"
)


@dataclass(frozen=True)
class Step:
    """A command line of `etude`, or with `python` of the interpreter; the exit code that it must have. A server is
    asked for `url` until it answers, and then interrupted."""

    line: str
    code: int = 0
    url: str = ""
    python: bool = False


TASKS = (Step("tasks build tiny -o tasks --max-tasks 6"), Step("tasks check tasks"))
STEPS: dict[str, tuple[Step, ...]] = {
    "core": (
        Step("--help"), Step("doctor"), Step("train --keys"), Step("live plan --help"), *TASKS,
        Step("apply m.py --edit-file sketch.py"), Step("doctor parity --script"),
        *(Step(line, 2) for line in ("demo", "serve nano", "eval nano --suite tasks", "live serve live.toml")),
    ),
    "play": (Step("doctor"), Step(RENDER, python=True), Step("serve nano", 2)),
    "serve": (
        Step("doctor"), *TASKS, Step(f"serve nano --port {ENGINE}", url=f"http://127.0.0.1:{ENGINE}/v1/models"),
        Step("eval nano --suite tasks --max-tasks 2 --samples 1 --json"), Step("weights keygen key"),
        Step("apply m.py --edit-file sketch.py --check"),
    ),
    "train": (
        Step("doctor"), Step("demo --trainer.steps 2 --eval.max_tasks 8 --tasks.max_tasks 40"),
        Step("eval nano --suite outputs/demo/tasks --max-tasks 4 --samples 1"),
        Step("weights inspect outputs/demo/weights"), Step("export outputs/demo -o trajectories"),
        Step("bench shared-prompt --quick --json"),
    ),
    "live": (
        Step("live key create live.toml tenant name"), Step("live tenant live.toml tenant --consent"),
        Step("live serve live.toml", url=f"http://127.0.0.1:{GATEWAY}/v1/models"), Step("live status live.toml"),
        Step("live gate live.toml", 2),
    ),
    "apply": (
        Step("apply m.py --edit-file sketch.py"), Step("tasks fast-apply tiny -o table"),
        Step("eval nano --suite fast-apply", 2),
    ),
}  # fmt: skip
WITH_TORCH = ("serve", "train")


@dataclass(frozen=True)
class Account:
    """A user to install as: the words before a command that make it theirs, and their home."""

    name: str
    prefix: tuple[str, ...]
    home: Path

    def environment(self) -> dict[str, str]:
        """The caller's variables, but for those of Python and of the caller's home."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "XDG_", "VIRTUAL_ENV", "PYENV"))}
        programs = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        return {**kept, "HOME": str(self.home), "USER": self.name, "LOGNAME": self.name, "PATH": programs}

    def run(self, words: Sequence[str], folder: Path, log: Path) -> int:
        """The exit code of a command; what it prints is appended to `log`."""
        with log.open("a") as out:
            print("$", *words, file=out, flush=True)
            done = subprocess.run(
                [*self.prefix, *words], cwd=folder, env=self.environment(), stdout=out, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL, timeout=SECONDS,
            )  # fmt: skip
        return done.returncode


def pythons() -> list[str]:
    """Interpreters of PYTHONS, else the system's and the newest of those on PATH and of pyenv's."""
    if given := os.environ.get("PYTHONS", "").split():
        return given
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = ["/usr/bin/python3", *(shutil.which(f"python3.{minor}") or "" for minor in range(11, 30))]
    candidates += [sys.executable, *map(str, pyenv.glob("3.*/bin/python3"))]
    known = {path: found for path in candidates if path and (found := version(path)) >= (3, 11)}
    newest = max(known, key=lambda path: known[path])
    return list(dict.fromkeys([path for path in ("/usr/bin/python3",) if path in known] + [newest]))


def version(python: str) -> tuple[int, ...]:
    """Of an interpreter that can make virtual environments; () of another."""
    code = "import sys, venv, ensurepip, sqlite3, ssl; print(*sys.version_info[:3])"
    with contextlib.suppress(OSError):
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60)
        return tuple(map(int, done.stdout.split()))
    return ()


# Opens an installation of Python that lies in a folder of root's: the command sees that installation there alone.
_OPEN = """
mount --bind "$1" "$2" && mount -t tmpfs -o mode=755 none "$3" && mkdir -p "$1" && mount --move "$2" "$1" || exit 126
shift 3
exec "$@"
"""


def reaching(account: Account, python: str, folder: Path) -> Account:
    """The account, with an interpreter opened to it that it could not read."""
    code = "import sys; print(sys.base_prefix)"
    prefix = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    closed = [parent for parent in (Path(prefix), *Path(prefix).parents) if not parent.stat().st_mode & 0o001]
    if not account.prefix or not closed:
        return account
    (folder / "hold").mkdir(exist_ok=True)
    opened = ("unshare", "--mount", "sh", "-c", _OPEN, "sh", prefix, str(folder / "hold"), str(closed[-1]))
    return replace(account, prefix=(*opened, *account.prefix))


def accounts(folder: Path) -> list[Account]:
    """A user without privileges, and root where this is root; else the caller."""
    if os.geteuid() != 0:
        return [Account(os.environ.get("USER", "user"), (), folder)]
    drop = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")
    made = [Account("nobody", drop, folder / "nobody"), Account("root", (), folder / "root")]
    for account in made:
        account.home.mkdir()
    os.chown(folder / "nobody", NOBODY, NOBODY)
    return made


def row(python: str, account: Account, extra: str, wheel: Path, log: Path) -> str:
    """Installs and runs everything of one row; "" or what failed."""
    folder = account.home / f"{extra}-{'.'.join(map(str, version(python)))}"
    environment, work = folder / "venv", folder / "work"
    pip = [str(environment / "bin/python"), "-m", "pip", "install", "--quiet"]
    wanted = str(wheel) if extra == "core" else f"{wheel}[{extra}]"
    setup = [["mkdir", "-p", str(work)], [python, "-m", "venv", str(environment)]]
    setup += [[*pip, TORCH]] if extra in WITH_TORCH else []
    setup += [[*pip, wanted], ["cp", "-r", f"{wheel.parent}/work/.", str(work)]]
    for words in setup:
        if code := account.run(words, account.home, log):
            return f"{' '.join(words)[:60]}: exit code {code}"
    if extra == "core" and (problem := too_big(environment, log)):
        return problem
    for step in STEPS[extra]:
        first = [str(environment / "bin/python"), "-c"] if step.python else [str(environment / "bin/etude")]
        words = [*first, *([step.line] if step.python else step.line.split())]
        code = served(account, words, work, log, step.url) if step.url else account.run(words, work, log)
        if code != step.code:
            return f"etude {step.line[:60]}: exit code {code}, not {step.code}"
    return ""


def served(account: Account, words: Sequence[str], folder: Path, log: Path, url: str) -> int:
    """The exit code of a server that is interrupted once it answers at `url`; -1 if it never does."""
    with log.open("a") as out:
        print("$", *words, file=out, flush=True)
        server = subprocess.Popen([*account.prefix, *words], cwd=folder, env=account.environment(), stdout=out,
                                  stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)  # fmt: skip
        try:
            answered = any(answers(url) for _ in until(server, 120))
            server.send_signal(signal.SIGINT)
            code = server.wait(60)
        finally:
            server.kill()
            server.wait()
        print(f"{url}: {'answered' if answered else 'no answer'}, exit code {code}", file=out)
    return code if answered else -1


def until(server: subprocess.Popen[bytes], seconds: float) -> Iterator[None]:
    """Turns until a server ends or the time has passed."""
    deadline = time.monotonic() + seconds
    while server.poll() is None and time.monotonic() < deadline:
        yield
        time.sleep(0.2)


def answers(url: str) -> bool:
    """Whether something answers with success, or asks for a key."""
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except urllib.error.HTTPError as e:
        return e.code == 401
    except OSError:
        return False


def too_big(environment: Path, log: Path) -> str:
    """What is wrong with the core's size; "" if nothing is."""
    packages = next(environment.glob("lib/python*/site-packages"))
    files = [p for p in packages.rglob("*") if p.is_file() and not p.relative_to(packages).parts[0].startswith("pip")]
    size = sum(p.stat().st_size for p in files if p.suffix != ".pyc") / 1e6
    with log.open("a") as out:
        print(f"site-packages without pip and bytecode: {size:.0f} MB", file=out)
    heavy = [name for name in HEAVY if (packages / name).exists()]
    return f"the core brings {', '.join(heavy)}" if heavy else f"the core has {size:.0f} MB" if size > MAX_MB else ""


def prepared(folder: Path) -> Path:
    """The wheel, and beside it what an empty folder gets: a small repository, a file, its edit, a configuration."""
    pip = [sys.executable, "-m", "pip", "--quiet", "wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(pip, check=True)
    shutil.copytree(ROOT / "tests/tasks/repositories/tiny-1.0", folder / "work/tiny")
    (folder / "work/m.py").write_text("def add(a, b):\n    return a - b\n")
    (folder / "work/sketch.py").write_text("def add(a, b):\n    return a + b\n")
    (folder / "work/live.toml").write_text(LIVE)
    return next(folder.glob("etude-*.whl"))


def main() -> int:
    """Prints the table, and what failed; 1 if a row did."""
    chosen = os.environ.get("EXTRAS", "").split() or list(STEPS)
    failed, lines, started = [], [], time.monotonic()
    with tempfile.TemporaryDirectory(prefix="etude-installed-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        wheel = prepared(folder)
        users = accounts(folder)
        for python in pythons():
            shown = ".".join(map(str, version(python)))
            for extra in chosen:
                for account in users if extra == "core" else users[:1]:
                    log, began = folder / f"{shown}-{account.name}-{extra}.log", time.monotonic()
                    other = extra in WITH_TORCH and version(python)[:2] != sys.version_info[:2]
                    problem = "" if other else row(python, reaching(account, python, folder), extra, wheel, log)
                    end = "no build of torch at hand" if other else problem or "ok"
                    lines.append(f"| {shown} {python} | {account.name} | {extra} | {end} | "
                                 f"{(time.monotonic() - began) / 60:.1f} |")  # fmt: skip
                    print(lines[-1], flush=True)
                    if problem:
                        failed.append(lines[-1])
                        print(*log.read_text().splitlines()[-40:], sep="\n", flush=True)
    print(f"\n{platform.platform()}, {(time.monotonic() - started) / 60:.0f} minutes\n")
    print("| Python | user | extra | | minutes |\n|---|---|---|---|---|", *lines, sep="\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
