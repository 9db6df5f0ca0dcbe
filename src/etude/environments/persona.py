"""Who a box seems to belong to: drawn from its image, so that the members of a group see the same machine.

What a persona covers is what costs next to nothing: names, clocks, files of /etc, the home folder, and two files of
/proc. `inside/persona.py` puts it in place; what it can't cover is listed in `parity/probes.py`.
"""

from __future__ import annotations

import math
import platform
import random
from dataclasses import asdict, dataclass
from typing import Any

_USERS = "alex anna ben carla chen dan elena emma felix finn hannah ivan jan julia kim lea leo lina mara max mia nina "
_USERS += "noah omar paul priya sam sofia tom yuki"
_HOSTS = ("{user}-laptop", "{user}-desktop", "{user}-ThinkPad-X1", "{user}-XPS-13", "dev-{n}", "ws-{n:04d}", "{user}-dev")
_EDITORS = ("vim", "nano", "code --wait", "emacs -nw")
_COMMANDS = (
    "git status", "git diff", "git pull", "ls -la", "cd src", "cd ..", "python3 -m pytest -q", "git log --oneline -5",
    "git add -p", "git commit", "make test", "grep -rn TODO .", "pip install -e .", "git push", "htop", "vim README.md",
    "git checkout main", "git stash", "df -h", "docker ps", "history | tail", "python3", "cat pyproject.toml",
)  # fmt: skip
_HOURS = (2.0, 400.0)  # of uptime: the middle 95 % or so of workstations that are suspended, not shut down
BASHRC = """# ~/.bashrc: executed by bash(1) for non-login shells.
case $- in
    *i*) ;;
      *) return;;
esac
HISTCONTROL=ignoreboth
HISTSIZE=1000
shopt -s histappend checkwinsize
alias ll='ls -alF'
"""


@dataclass(frozen=True)
class Persona:
    """`files` lie in the home folder; `environment` joins the shell's; `uptime` is in seconds."""

    user: str
    host: str
    machine_id: str
    uptime: float
    kernel_line: str
    files: dict[str, str]
    environment: dict[str, str]

    def plain(self) -> dict[str, Any]:
        """For the request that starts a live box."""
        return asdict(self)


def draw(seed: bytes) -> Persona:
    """The persona of an image. `seed` is a digest of the image."""
    rng = random.Random(seed)
    user = rng.choice(_USERS.split())
    host = rng.choice(_HOSTS).format(user=user, n=rng.randrange(1, 400))
    low, high = map(math.log, _HOURS)
    hours = math.exp(min(high, max(low, rng.gauss((low + high) / 2, (high - low) / 4))))
    disk = "-".join(f"{rng.getrandbits(bits):0{bits // 4}x}" for bits in (32, 16, 16, 16, 48))
    return Persona(
        user=user,
        host=host,
        machine_id=f"{rng.getrandbits(128):032x}\n",
        uptime=hours * 3600,
        kernel_line=f"BOOT_IMAGE=/boot/vmlinuz-{platform.release()} root=UUID={disk} ro quiet splash\n",
        files=_home(rng, user),
        environment=_environment(rng, user),
    )


def _home(rng: random.Random, user: str) -> dict[str, str]:
    history = "".join(f"{rng.choice(_COMMANDS)}\n" for _ in range(rng.randrange(80, 1000)))
    mail = f"{user}@{rng.choice(('users.noreply.github.com', 'posteo.net', 'fastmail.com'))}"
    files = {
        ".bashrc": BASHRC,
        ".profile": '[ -n "$BASH_VERSION" ] && . "$HOME/.bashrc"\n',
        ".bash_history": history,
        ".gitconfig": f"[user]\n\tname = {user.title()}\n\temail = {mail}\n[pull]\n\trebase = true\n",
    }
    if rng.random() < 0.6:
        files[".vimrc"] = "set number\nset expandtab shiftwidth=4\nsyntax on\n"
    if rng.random() < 0.5:
        files[".python_history"] = "import sys\nsys.path\n"
    if rng.random() < 0.4:
        files[".tmux.conf"] = "set -g mouse on\nset -g history-limit 50000\n"
    return files


def _environment(rng: random.Random, user: str) -> dict[str, str]:
    named = {"HOME": f"/home/{user}", "LOGNAME": user, "USER": user, "EDITOR": rng.choice(_EDITORS)}
    if rng.random() < 0.6:
        named["PAGER"] = "less"
    if rng.random() < 0.6:
        named |= {"COLORTERM": "truecolor", "LESS": "-R"}
    return named
