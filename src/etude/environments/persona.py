"""Who a box seems to belong to: drawn from its image, so that the members of a group see the same machine.

A persona looks like one sample of `like`, fingerprints of production machines (`parity/fingerprint.py`), or, without
any, like a workstation as we imagine it. It covers what costs next to nothing: names, clocks, files of /etc, the home
folder, the environment, and two files of /proc. `inside/persona.py` puts it in place; what it can't cover is listed in
`parity/probes.py`. Fingerprints hold no names and no contents: those are made up here.
"""

from __future__ import annotations

import math
import platform
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

_USERS = (
    *(
        "alex",
        "anna",
        "ben",
        "carla",
        "chen",
        "dan",
        "elena",
        "emma",
        "felix",
        "finn",
        "hannah",
        "ivan",
        "jan",
        "julia",
    ),
    *(
        "kim",
        "lea",
        "leo",
        "lina",
        "mara",
        "max",
        "mia",
        "nina",
        "noah",
        "omar",
        "paul",
        "priya",
        "sam",
        "sofia",
        "tom",
    ),
)
_SHAPES = ("a-a", "a-a-a9", "a-9", "a", "a-a-9")
_WORDS = ("laptop", "desktop", "thinkpad", "dev", "work", "home", "box", "ws")
_HOURS = (2.0, 400.0)  # of uptime: the middle of workstations that are suspended, not shut down
_COMMANDS = (
    "git status", "git diff", "git pull", "ls -la", "cd src", "cd ..", "python3 -m pytest -q", "git log --oneline -5",
    "git add -p", "git commit", "make test", "grep -rn TODO .", "pip install -e .", "git push", "htop", "vim README.md",
    "git checkout main", "git stash", "df -h", "docker ps", "history | tail", "python3", "cat pyproject.toml",
)  # fmt: skip
_BASHRC = """# ~/.bashrc: executed by bash(1) for non-login shells.
case $- in
    *i*) ;;
      *) return;;
esac
HISTCONTROL=ignoreboth
HISTSIZE=1000
shopt -s histappend checkwinsize
alias ll='ls -alF'
"""
_TEXTS = {
    ".bashrc": _BASHRC,
    ".profile": '[ -n "$BASH_VERSION" ] && . "$HOME/.bashrc"\n',
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
    "GIT_EDITOR": "vim", "HISTCONTROL": "ignoreboth", "HISTSIZE": "1000", "LANGUAGE": "en_US:en", "LESS": "-FRX",
    "LS_COLORS": "di=01;34:ln=01;36:ex=01;32", "PAGER": "less",
    "SSH_TTY": "/dev/pts/0", "TERM_PROGRAM": "vscode", "TZ": "Europe/Berlin", "VISUAL": "vim",
    "XDG_DATA_DIRS": "/usr/local/share:/usr/share", "XDG_RUNTIME_DIR": "/run/user/1000", "XDG_SESSION_ID": "2",
    "XDG_SESSION_TYPE": "wayland",
}  # fmt: skip
_MORE = (  # of a desktop session: no tool of a repository looks at them
    *("DESKTOP_SESSION", "GDMSESSION", "GJS_DEBUG_TOPICS", "GNOME_TERMINAL_SCREEN", "GPG_AGENT_INFO", "GTK_MODULES"),
    *(
        "IM_CONFIG_PHASE",
        "MEMORY_PRESSURE_WATCH",
        "NO_AT_BRIDGE",
        "QT_ACCESSIBILITY",
        "QT_IM_MODULE",
        "SESSION_MANAGER",
    ),
    *("USERNAME", "VTE_VERSION", "WINDOWPATH", "XDG_CURRENT_DESKTOP", "XDG_MENU_PREFIX", "XDG_SEAT", "XDG_VTNR"),
    *("XDG_SESSION_CLASS", "XDG_SESSION_DESKTOP", "XMODIFIERS"),
)
_PATH = ("{home}/.local/bin", "{home}/bin", "{home}/.cargo/bin", "/usr/local/sbin", "/usr/sbin", "/sbin", "/usr/games",
         "/usr/local/games", "/snap/bin", "/opt/bin", "{home}/go/bin", "{home}/.npm/bin")  # fmt: skip


@dataclass(frozen=True)
class Persona:
    """`files` and `folders` lie in the home folder; `environment` joins the shell's; `uptime` is in seconds."""

    user: str
    host: str
    known_host: bool  # in /etc/hosts
    machine_id: str
    accounts: int  # in /etc/passwd
    uptime: float
    kernel_line: str
    hypervisor: bool  # /proc/cpuinfo tells of one
    files: dict[str, str]
    folders: tuple[str, ...]
    path: tuple[str, ...]  # further entries of PATH
    environment: dict[str, str]

    def plain(self) -> dict[str, Any]:
        """For the request that starts a live box."""
        return asdict(self)


def draw(seed: bytes, like: Sequence[Mapping[str, Any]] = ()) -> Persona:
    """The persona of an image. `seed` is a digest of the image, `like` are the probes of production samples."""
    rng = random.Random(seed)
    seen = rng.choice(like) if like else _workstation(rng)
    user = rng.choice(_USERS)
    files, folders = _home(rng, user, seen)
    return Persona(
        user=user,
        host=_name(rng, str(seen.get("host.shape", "a-a"))),
        known_host=bool(seen.get("host.in_hosts", True)),
        machine_id=f"{rng.getrandbits(128):032x}\n" if seen.get("machine_id", 32) else "",
        accounts=int(seen.get("accounts", 30)),
        uptime=float(seen.get("uptime", 36_000.0)) * (0.8 + 0.4 * rng.random()),
        kernel_line=_kernel_line(rng, seen.get("kernel.line", ("BOOT_IMAGE", "quiet", "ro", "root", "splash"))),
        hypervisor=bool(seen.get("cpu.hypervisor", False)),
        files=files,
        folders=folders,
        path=tuple(e.format(home=f"/home/{user}") for e in _PATH[: max(0, int(seen.get("path", 4)) - 4)]),
        environment=_environment(user, seen),
    )


def _workstation(rng: random.Random) -> dict[str, Any]:
    """Probes of a machine that nobody has measured."""
    low, high = map(math.log, _HOURS)
    hours = math.exp(min(high, max(low, rng.gauss((low + high) / 2, (high - low) / 4))))
    dotfiles = [".bash_history", ".bashrc", ".cache", ".config", ".gitconfig", ".local", ".profile", ".ssh"]
    dotfiles += [name for name in (".vimrc", ".python_history", ".tmux.conf", ".npm") if rng.random() < 0.5]
    environment = ["COLORTERM", "EDITOR", "LESS", "LS_COLORS", "PAGER", "XDG_RUNTIME_DIR", "XDG_SESSION_TYPE"]
    return {
        "host.shape": rng.choice(_SHAPES),
        "uptime": hours * 3600,
        "history": rng.randrange(80, 1000),
        "dotfiles": dotfiles,
        "home.entries": len(dotfiles) + rng.randrange(3, 10),
        "environment": [name for name in environment if rng.random() < 0.7],
        "environment.count": rng.randrange(18, 40),
        "path": rng.randrange(5, 10),
    }


def _name(rng: random.Random, shape: str) -> str:
    """A host name of that shape: words for `a`, numbers for `9`."""
    parts = [rng.choice(_WORDS) if c == "a" else str(rng.randrange(1, 400)) if c == "9" else c for c in shape]
    name = "".join(c for c in "".join(parts) if c.isalnum() or c in "-.")[:60].strip("-.")
    return name or "localhost"


def _kernel_line(rng: random.Random, names: Sequence[str]) -> str:
    disk = "-".join(f"{rng.getrandbits(bits):0{bits // 4}x}" for bits in (32, 16, 16, 16, 48))
    values = {"BOOT_IMAGE": f"/boot/vmlinuz-{platform.release()}", "root": f"UUID={disk}", "console": "tty0"}
    bare = {"nomodule", "quiet", "rhgb", "ro", "rw", "splash"}
    return " ".join(name if name in bare else f"{name}={values.get(name, '1')}" for name in names) + "\n"


def _home(rng: random.Random, user: str, seen: Mapping[str, Any]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Files by name, and folders, of the home folder."""
    names = [str(name) for name in seen.get("dotfiles", ())]
    plain = [name for name in _HOME if "." in name or name not in _FOLDERS]
    names += plain[: max(0, int(seen.get("home.entries", 0)) - len(names))]
    mail = f"{user}@{rng.choice(('users.noreply.github.com', 'posteo.net', 'fastmail.com'))}"
    texts = _TEXTS | {
        ".bash_history": "".join(f"{rng.choice(_COMMANDS)}\n" for _ in range(min(5000, int(seen.get("history", 0))))),
        ".gitconfig": f"[user]\n\tname = {user.title()}\n\temail = {mail}\n[pull]\n\trebase = true\n",
    }
    files = {name: texts.get(name, "") for name in names if name.startswith(".") and name not in _FOLDERS}
    files |= {name: "" for name in names if name.endswith((".md", ".txt"))}
    return files, tuple(name for name in names if name not in files)


def _environment(user: str, seen: Mapping[str, Any]) -> dict[str, str]:
    named = {"HOME": f"/home/{user}", "LOGNAME": user, "USER": user}
    for name in seen.get("environment", ()):
        if name in _VALUES:
            named[name] = _VALUES[name]
        elif name == "EDITOR":
            named[name] = "vim"
    for name, probe in (("TERM", "terminal.kind"), ("LANG", "language")):
        if seen.get(probe) not in (None, "none", "dumb"):
            named[name] = str(seen[probe])
    missing = int(seen.get("environment.count", 0)) - len(named) - 9  # what a box's shell has besides
    return named | dict.fromkeys(_MORE[: max(0, missing)], "1")
