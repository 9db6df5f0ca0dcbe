"""The machine that a box imitates: drawn from its image, so that the members of a group see the same machine.

A machine profile imitates one fingerprint of a production machine (`fingerprints.py`), or is drawn from a description
of machines (`workspace.toml`). A profile covers cheap properties: names, clocks, files of /etc, the home folder, the
environment, the terminal, the age of the checkout, and two files of /proc. `guest/machine_profile.py` puts a profile in
place; `audit/parity/probes.py` lists the properties that no profile covers. Fingerprints hold no names and no contents:
both are made up here, or taken from the reference description.
"""

from __future__ import annotations

import platform
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from etude.sandbox import fingerprints, machine_description
from etude.sandbox.machine_description import REFERENCE, Description, within

ProfileSource = Description | Literal["image"] | Sequence[Mapping[str, Any]]

_SHAPES = {"a": ("laptop", "desktop", "thinkpad", "dev", "work", "home", "box", "ws", "cloud", "pod")}
_INITS = (  # of containers; a fingerprint holds the length
    *(("sleep", "infinity"), ("tail", "-f", "/dev/null"), ("/bin/bash",), ("/bin/sh",), ("sh", "-c", "sleep infinity")),
    *(("/sbin/docker-init", "--", "sleep", "infinity"), ("/usr/bin/tini", "--", "sleep", "infinity")),
    *(("/usr/bin/dumb-init", "--", "/usr/bin/supervisord", "-n"), ("/pause",), ("/usr/local/bin/entrypoint.sh",)),
)
_NAMED = {"systemd": ("/sbin/init",), "init": ("/sbin/init",), "bash": ("/bin/bash",), "sh": ("/bin/sh",)}
_TEXTS = {
    ".python_history": "import sys\nsys.path\n",
    ".tmux.conf": "set -g mouse on\nset -g history-limit 50000\n",
    ".vimrc": "set number\nset expandtab shiftwidth=4\nsyntax on\n",
}
_FOLDERS = frozenset(
    {".cache", ".cargo", ".config", ".docker", ".gnupg", ".ipython", ".kube", ".local", ".npm", ".nvm", ".oh-my-zsh"}
    | {".pyenv", ".ssh", ".vim", ".vscode", ".vscode-server"}
)
_HOME = ("Desktop", "Documents", "Downloads", "bin", "code", "notes.md", "src", "todo.txt", "tmp", "work", "Pictures")
_VALUES = {  # a pager with these options does not wait for a key where a screen is enough
    "COLORTERM": "truecolor", "DBUS_SESSION_BUS_ADDRESS": "unix:path=/run/user/1000/bus", "DISPLAY": ":0",
    "EDITOR": "vim", "GIT_EDITOR": "vim", "HISTCONTROL": "ignoreboth", "HISTSIZE": "1000", "HOSTNAME": "{host}",
    "LANG": "C.UTF-8", "LANGUAGE": "en_US:en", "LESS": "-FRX", "LOGNAME": "{user}",
    "LS_COLORS": "di=01;34:ln=01;36:ex=01;32", "MAIL": "/var/mail/{user}", "PAGER": "less", "SHELL": "/bin/bash",
    "SSH_TTY": "/dev/pts/0", "TERM": "xterm-256color", "TERM_PROGRAM": "vscode", "TZ": "Europe/Berlin",
    "USER": "{user}", "VISUAL": "vim",
    "XDG_DATA_DIRS": "/usr/local/share:/usr/share", "XDG_RUNTIME_DIR": "/run/user/1000", "XDG_SESSION_ID": "2",
    "XDG_SESSION_TYPE": "wayland",
}  # fmt: skip
_MORE = (  # of a desktop session: no tool of a repository looks at them
    *("DESKTOP_SESSION", "GDMSESSION", "GJS_DEBUG_TOPICS", "GNOME_TERMINAL_SCREEN", "GPG_AGENT_INFO", "GTK_MODULES"),
    *("IM_CONFIG_PHASE", "MEMORY_PRESSURE_WATCH", "NO_AT_BRIDGE", "QT_ACCESSIBILITY", "QT_IM_MODULE"),
    *("SESSION_MANAGER", "USERNAME", "VTE_VERSION", "WINDOWPATH", "XDG_CURRENT_DESKTOP", "XDG_MENU_PREFIX"),
    *("XDG_SEAT", "XDG_VTNR", "XDG_SESSION_CLASS", "XDG_SESSION_DESKTOP", "XMODIFIERS"),
)
_SHELL_SETS = frozenset({"HOME", "OLDPWD", "PATH", "PWD", "SHLVL", "_"})  # a box's shell has them anyway
_PATH = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
_FEW = frozenset({"/usr/local/bin", "/usr/bin", "/bin"})  # never left out of PATH
_PATH_MORE = ("{home}/.local/bin", "{home}/bin", "{home}/.cargo/bin", "/usr/games", "/usr/local/games", "/snap/bin",
              "/opt/bin", "{home}/go/bin", "{home}/.npm/bin")  # fmt: skip


SIZE = 40, 120  # rows and columns of a terminal by default, as in guest/shell.py


@dataclass(frozen=True)
class MachineProfile:
    """A machine to imitate, times in seconds; `environment` lacks PATH. None: the box's own."""

    user: str
    host: str
    known_host: bool  # in /etc/hosts
    machine_id: str  # empty: there is no /etc/machine-id
    accounts: int  # in /etc/passwd
    uptime: float | None
    init: tuple[str, ...]  # command line of pid 1
    init_name: str
    kernel_line: str | None
    hypervisor: bool | None  # /proc/cpuinfo shows one
    files: dict[str, str]
    folders: tuple[str, ...]
    path: tuple[str, ...]
    environment: dict[str, str]
    size: tuple[int, int]  # rows and columns of the terminal
    checkout_age: float | None  # of the files in the work tree
    checkout_rate: float  # files that it wrote in a second
    pids: int  # processes before the agent's
    contained: bool = False  # a container of the image, with its accounts and home folder


@dataclass(frozen=True)
class ImageTerminal:
    """An interactive shell in a container of an image: its variables, and the number of processes that its start-up
    files ran."""

    environment: Mapping[str, str] = field(default_factory=dict)
    processes: int = 0

    @classmethod
    def read(cls, text: str) -> ImageTerminal:
        """The shell that printed the number of its next process, its own, and its variables, each before a NUL. Raises
        ValueError."""
        after, before, *variables = text.split("\0")
        pairs = (entry.partition("=") for entry in variables if entry)
        return cls({name: value for name, _, value in pairs}, max(0, int(after) - int(before) - 1))


@cache
def reference() -> Description:
    """The description that profiles are drawn from by default."""
    return machine_description.read(REFERENCE)


def load_profiles(path: Path) -> Description | Sequence[Mapping[str, Any]]:
    """The source of profiles: a description of machines (.toml), or fingerprints. Raises UserError."""
    if path.suffix == ".toml":
        return machine_description.read(path)
    return [sample.probes for sample in fingerprints.read_fingerprints([path])]


def checkout(rng: random.Random) -> tuple[float, float]:
    """Age in seconds of a checkout, and the files that it wrote in a second, as the reference description has them."""
    machine = reference()
    return 60 * within(rng, machine.checkout_minutes), within(rng, machine.checkout_rate)


def container(seed: bytes, user: str, terminal: ImageTerminal) -> MachineProfile:
    """A container of an image, as `podman run` makes one and `podman exec` enters it, in which `user` works."""
    rng = random.Random(seed)
    environment = {name: text for name, text in terminal.environment.items() if name not in _SHELL_SETS}
    age, rate = checkout(rng)
    return MachineProfile(
        user=user,
        host=f"{rng.getrandbits(48):012x}",
        known_host=True,
        machine_id="",
        accounts=0,
        uptime=None,
        init=_INITS[0],
        init_name=_INITS[0][0],
        kernel_line=None,
        hypervisor=None,
        files={},
        folders=(),
        path=tuple(terminal.environment.get("PATH", ":".join(_PATH)).split(":")),
        environment={"TERM": "xterm", "container": "podman"} | environment,
        size=SIZE,
        checkout_age=age,
        checkout_rate=rate,
        pids=rng.choice((8, 8, 8, 8, 9)) + terminal.processes,  # threads of the runtime come first
        contained=True,
    )


def draw(seed: bytes, source: Description | Sequence[Mapping[str, Any]] = ()) -> MachineProfile:
    """The machine profile of an image, whose digest is `seed`; by default one of the reference description."""
    rng = random.Random(seed)
    if isinstance(source, Description) or not source:
        return _described(rng, source if isinstance(source, Description) else reference())
    return _imitated(rng, rng.choice(source))


def _described(rng: random.Random, machine: Description) -> MachineProfile:
    def maybe(values: Any) -> list[Any]:
        return [value for value in values if rng.random() < 0.5]

    user = rng.choice(machine.users)
    host = rng.choice(machine.hosts).format(user=user, n=rng.randrange(1, 400), hex=f"{rng.getrandbits(32):08x}")
    home = machine.home | dict(maybe(machine.sometimes.home.items()))
    history = _history(rng, machine.commands, int(within(rng, machine.history)))
    known = {"user": user, "User": user.title(), "host": host}
    environment = machine.environment | dict(maybe(machine.sometimes.environment.items()))
    environment = {"TERM": rng.choice(machine.terminals)} | environment
    return MachineProfile(
        user=user,
        host=host,
        known_host=machine.known_host,
        machine_id=f"{rng.getrandbits(128):032x}\n" if machine.machine_id else "",
        accounts=machine.accounts,
        uptime=3600 * within(rng, machine.uptime_hours),
        init=machine.init,
        init_name=machine.init[0].rpartition("/")[2][:15],
        kernel_line=None if machine.kernel_line is None else machine.kernel_line + "\n",
        hypervisor=machine.hypervisor,
        files={name: history if text == "{history}" else _filled(text, known) for name, text in home.items()},
        folders=(*machine.folders.always, *maybe(machine.folders.sometimes)),
        path=tuple(_filled(entry, {"home": f"/home/{user}"}) for entry in machine.path),
        environment={name: _filled(text, known) for name, text in environment.items()},
        size=rng.choice(machine.sizes),
        checkout_age=60 * within(rng, machine.checkout_minutes),
        checkout_rate=within(rng, machine.checkout_rate),
        pids=int(within(rng, machine.pids)),
    )


def _imitated(rng: random.Random, probes: Mapping[str, Any]) -> MachineProfile:
    """A profile that imitates one fingerprint, which may lack probes."""
    user = rng.choice(reference().users)
    host = _name(rng, str(probes.get("host.shape", "a-a")))
    files, folders = _home(rng, user, probes)
    age = probes.get("files.age")
    return MachineProfile(
        user=user,
        host=host,
        known_host=bool(probes.get("host.in_hosts", True)),
        machine_id=f"{rng.getrandbits(128):032x}\n" if probes.get("machine_id") else "",
        accounts=int(probes.get("accounts", 19)),
        uptime=float(probes.get("uptime", 36_000.0)) * (0.8 + 0.4 * rng.random()),
        init=(init := _init(probes)),
        init_name="systemd" if probes.get("pid1.name") == "systemd" else init[0].rpartition("/")[2][:15],
        kernel_line=_kernel_line(rng, probes["kernel.line"]) if "kernel.line" in probes else None,
        hypervisor=bool(probes["cpu.hypervisor"]) if "cpu.hypervisor" in probes else None,
        files=files,
        folders=folders,
        path=_path(user, int(probes.get("path", len(_PATH)))),
        environment=_environment(user, host, probes),
        size=(int(probes.get("terminal.rows", 40)), int(probes.get("terminal.columns", 120))),
        checkout_age=None if age is None else float(age) * (0.8 + 0.4 * rng.random()),
        checkout_rate=within(rng, reference().checkout_rate),
        pids=max(2, int(probes.get("pid.self", 40)) - rng.randrange(1, 5)),
    )


def _filled(text: str, known: Mapping[str, str]) -> str:
    """The text with its {NAME} replaced; not by str.format, since files have braces of their own."""
    for name, value in known.items():
        text = text.replace("{" + name + "}", value)
    return text


def _history(rng: random.Random, commands: Sequence[str], lines: int) -> str:
    return "".join(f"{rng.choice(commands)}\n" for _ in range(min(5000, lines)))


def _name(rng: random.Random, shape: str) -> str:
    """A host name of a shape: words for `a`, numbers for `9`."""
    parts = [rng.choice(_SHAPES["a"]) if c == "a" else str(rng.randrange(1, 400)) if c == "9" else c for c in shape]
    name = "".join(c for c in "".join(parts) if c.isalnum() or c in "-.")[:60].strip("-.")
    return name or "localhost"


def _init(probes: Mapping[str, Any]) -> tuple[str, ...]:
    """A command line of pid 1 with the fingerprint's name and about its length."""
    named = _NAMED.get(str(probes.get("pid1.program", "another")))
    if named is not None:
        return named
    length = int(probes.get("pid1.line", 15))
    return min(_INITS, key=lambda line: abs(sum(map(len, line)) + len(line) - length))


def _kernel_line(rng: random.Random, names: Sequence[str]) -> str:
    disk = "-".join(f"{rng.getrandbits(bits):0{bits // 4}x}" for bits in (32, 16, 16, 16, 48))
    values = {"BOOT_IMAGE": f"/boot/vmlinuz-{platform.release()}", "root": f"UUID={disk}", "console": "tty0"}
    bare = {"nomodule", "quiet", "rhgb", "ro", "rw", "splash"}
    return " ".join(name if name in bare else f"{name}={values.get(name, '1')}" for name in names) + "\n"


def _home(rng: random.Random, user: str, probes: Mapping[str, Any]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Files by name, and folders, of the home folder."""
    names = [str(name) for name in probes.get("dotfiles", ())]
    names += [".local"] * (".local" not in names)  # Python finds its modules there: `guest/machine_profile.py`
    names += _HOME[: max(0, int(probes.get("home.entries", 0)) - len(names))]
    machine = reference()
    known = {"user": user, "User": user.title()}
    texts = {name: _filled(text, known) for name, text in machine.home.items()} | _TEXTS
    texts[".bash_history"] = _history(rng, machine.commands, int(probes.get("history", 0)))
    files = {name: texts.get(name, "") for name in names if name.startswith(".") and name not in _FOLDERS}
    files |= {name: "" for name in names if name.endswith((".md", ".txt"))}
    return files, tuple(name for name in names if name not in files)


def _path(user: str, count: int) -> tuple[str, ...]:
    """PATH with `count` entries."""
    more = tuple(entry.format(home=f"/home/{user}") for entry in _PATH_MORE[: max(0, count - len(_PATH))])
    if count >= len(_PATH):
        return (*more, *_PATH)
    return tuple(e for e in _PATH if e in _FEW) + tuple(e for e in _PATH if e not in _FEW)[: max(0, count - len(_FEW))]


def _environment(user: str, host: str, probes: Mapping[str, Any]) -> dict[str, str]:
    names = [name for name in probes.get("environment", ("LANG", "TERM")) if name in _VALUES]
    known = {"user": user, "host": host}
    variables = {name: _filled(_VALUES[name], known) for name in names}
    for name, probe in (("TERM", "terminal.kind"), ("LANG", "language")):
        if name in variables and probe in probes:
            variables[name] = str(probes[probe])
    missing = int(probes.get("environment.count", 0)) - len(variables) - len(_SHELL_SETS - {"OLDPWD"})
    return variables | dict.fromkeys(_MORE[: max(0, missing)], "1")
