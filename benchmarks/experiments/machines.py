"""Real machines out of a description (`parity/workspace.toml`), and their fingerprints: the other side of the audit.

    debootstrap --variant=minbase --include=git,python3,... bookworm ROOT
    python -m benchmarks.experiments.machines --root ROOT --repository REPO --output machines.jsonl --machines 12
    --samples 20

Root only, with runc, unshare, nsenter, and the seccomp profile of Podman and Docker. Each machine is a container with
Docker's defaults on an overlay over ROOT, a tree that debootstrap or an image has made. What a description says is done
by the means of the distribution: `useradd` makes the account, git clones REPO (with the depth that the description
says, from a commit that is drawn), and programs of the container write its files. Nothing of etude runs in it but
`fingerprint.py`, typed into a bash on a pseudo-terminal, as a product's agent types. Drawn, because they cannot be
waited for: the uptime (a time namespace below the container) and the age of the clone (its files are dated back
together). The kernel, the disk and the load are this machine's.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import pty
import random
import select
import shutil
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from etude.audit.parity import fingerprint
from etude.sandbox.machine_description import REFERENCE, Description, read
from etude.sandbox.machine_profile import MachineProfile, draw

PROFILE = Path("/usr/share/containers/seccomp.json")
SECONDS = 300.0  # of one command
COMMITS = 4  # a clone is of one of the last so many
SESSIONS = 4  # terminals in which a machine's samples are taken
# Docker's, from its documentation of --cap-add.
_NAMES = """
AUDIT_WRITE CHOWN DAC_OVERRIDE FOWNER FSETID KILL MKNOD NET_BIND_SERVICE NET_RAW
SETFCAP SETGID SETPCAP SETUID SYS_CHROOT
"""
CAPABILITIES = [f"CAP_{name}" for name in _NAMES.split()]
_PLAN = """set -eu
useradd -m -s /bin/bash -u 1000 "$USER_NAME"
cp -r /tmp/plan/home/. /home/$USER_NAME/
chown -R 1000:1000 /home/$USER_NAME
mkdir -p /workspace && chown 1000:1000 /workspace
"""
_CLONE = """set -eu
git clone --quiet --depth "$DEPTH" --branch "work" file:///srv/repo.git /workspace
git -C /workspace remote set-url origin "$ORIGIN"
python3 - "$AGE" <<'END'
import os, sys
for folder, _, names in os.walk("/workspace", topdown=False):
    for path in [*(os.path.join(folder, name) for name in names), folder]:
        when = os.lstat(path).st_mtime - float(sys.argv[1])
        os.utime(path, (when, when), follow_symlinks=False)
END
"""
# Programs have run in a workspace before an agent comes; how many is seen in the next process's number.
_WORK = """while [ "$(sh -c 'echo $$')" -lt "$PIDS" ]; do /bin/true; done
"""


@dataclass(frozen=True)
class Machine:
    """A running container. `clock` enters the time namespace that its uptime comes from."""

    name: str
    folder: Path
    persona: MachineProfile
    clock: tuple[str, ...]

    def run(self, script: str, user: int, **variables: str) -> None:
        """A script in the container, without a terminal."""
        process = _process(self.persona, user, ["/bin/sh", "-c", script], terminal=False, more=variables)
        path = self.folder / "process.json"
        path.write_text(json.dumps(process))
        _ask(*self.clock, "runc", "exec", "--process", str(path), self.name)

    def typed(self, line: str) -> None:
        """A line typed into bash on a pseudo-terminal, and its end awaited. Raises TimeoutError."""
        path = self.folder / "process.json"
        path.write_text(json.dumps(_process(self.persona, 1000, ["bash"], terminal=True, more={})))
        command = [*self.clock, "runc", "exec", "--process", str(path), self.name]
        pid, master = pty.fork()
        if pid == 0:
            os.execvp(command[0], command)
        fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", *self.persona.size, 0, 0))
        deadline = time.monotonic() + SECONDS
        sent = False
        with open(master, "rb", buffering=0) as terminal:
            while time.monotonic() < deadline:
                if not select.select([terminal], [], [], 1.0)[0]:
                    continue
                try:
                    data = terminal.read(65536)
                except OSError:  # the other end is closed
                    data = b""
                if not data:
                    os.waitpid(pid, 0)
                    return
                if not sent:  # its prompt: the size of the terminal has arrived by then
                    os.write(master, f"{line}; exit\n".encode())
                    sent = True
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        raise TimeoutError(f"{self.name} did not answer within {SECONDS:.0f} s")


def _ask(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)[:200]}: {(done.stderr or done.stdout).strip()[-400:]}")
    return done.stdout


def _process(
    persona: MachineProfile, user: int, argv: list[str], *, terminal: bool, more: dict[str, str]
) -> dict[str, object]:
    home = f"/home/{persona.user}" if user else "/root"
    variables = {"PATH": ":".join(persona.path), "HOME": home} | persona.environment | more
    capabilities = CAPABILITIES if user == 0 else []
    return {
        "terminal": terminal,
        "user": {"uid": user, "gid": user, "additionalGids": [user]},
        "args": argv,
        "env": [f"{name}={value}" for name, value in variables.items()],
        "cwd": "/workspace" if terminal else "/",
        "capabilities": dict.fromkeys(("effective", "permitted"), capabilities) | {"bounding": CAPABILITIES},
        "noNewPrivileges": False,
    }


def _seccomp() -> dict[str, object]:
    """The default profile of container engines, as the runtime takes it: rules for other machines left out."""
    profile = json.loads(PROFILE.read_text())
    rules = []
    for rule in profile["syscalls"]:
        needs, spares = rule.get("includes") or {}, rule.get("excludes") or {}
        there = set(needs.get("caps", ())) <= set(CAPABILITIES) and "amd64" in needs.get("arches", ["amd64"])
        if there and not set(spares.get("caps", ())) & set(CAPABILITIES) and "amd64" not in spares.get("arches", ()):
            kept = {key: rule[key] for key in ("names", "action", "errnoRet") if key in rule}
            rules.append(kept | {"args": rule.get("args") or []})
    return {
        "defaultAction": profile["defaultAction"],
        "defaultErrnoRet": profile.get("defaultErrnoRet", 1),
        "architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"],
        "syscalls": rules,
    }


def _bundle(folder: Path, merged: Path, persona: MachineProfile) -> None:
    """config.json of the container."""
    _ask("runc", "spec", "--bundle", str(folder))
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["process"] = _process(persona, 0, list(persona.init), terminal=False, more={}) | {"cwd": "/"}
    config["root"] = {"path": str(merged), "readonly": False}
    config["hostname"] = persona.host
    config["linux"]["seccomp"] = _seccomp()
    config["linux"]["namespaces"].append({"type": "cgroup"})
    config["linux"]["resources"] = {}
    path.write_text(json.dumps(config))


@contextlib.contextmanager
def running(number: int, persona: MachineProfile, root: Path, work: Path) -> Iterator[Machine]:
    """A started container over `root`; gone afterwards."""
    folder, name = work / f"m{number}", f"etude-machine-{os.getpid()}-{number}"
    merged = folder / "merged"
    for part in ("upper", "work", "merged"):
        (folder / part).mkdir(parents=True)
    with ExitStack() as ends:
        ends.callback(shutil.rmtree, folder, ignore_errors=True)
        options = f"lowerdir={root},upperdir={folder}/upper,workdir={folder}/work"
        _ask("mount", "-t", "overlay", "overlay", "-o", options, str(merged))
        ends.callback(_ask, "umount", "-l", str(merged))
        own = f"172.17.0.{number + 2}\t{persona.host}\n" if persona.known_host else ""
        (merged / "etc/hosts").write_text(f"127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n{own}")
        (merged / "etc/hostname").write_text(f"{persona.host}\n")
        (merged / "etc/resolv.conf").write_text("nameserver 172.17.0.1\n")
        if persona.machine_id:
            (merged / "etc/machine-id").write_text(persona.machine_id)
        _bundle(folder, merged, persona)
        clock = ends.enter_context(_clock(persona.uptime))
        subprocess.run([*clock, "runc", "run", "--detach", "--bundle", str(folder), name], check=True, timeout=SECONDS,
                       stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)  # fmt: skip
        ends.callback(_ask, *clock, "runc", "delete", "--force", name)
        _network(int(json.loads(_ask(*clock, "runc", "state", name))["pid"]), number)
        yield Machine(name, folder, persona, clock)


@contextlib.contextmanager
def _clock(uptime: float) -> Iterator[tuple[str, ...]]:
    """A command prefix. A container's clock is its host's, so the host of each is given another one.

    The runtime knows its containers by when they began, so all that it does must go by the same clock.
    """
    shift = str(max(0, int(uptime - time.clock_gettime(time.CLOCK_BOOTTIME))))
    holder = subprocess.Popen(["unshare", "--time", "--boottime", shift, "--monotonic", shift, "sleep", "infinity"])
    try:
        _until(lambda: Path(f"/proc/{holder.pid}/comm").read_text() == "sleep\n")
        yield ("nsenter", f"--time=/proc/{holder.pid}/ns/time_for_children")
    finally:
        holder.kill()
        holder.wait()


def _until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError("a process did not start")
        time.sleep(0.01)


def _network(pid: int, number: int) -> None:
    """An eth0 as on Docker's bridge, where the kernel has such devices."""
    enter = ("nsenter", f"--net=/proc/{pid}/ns/net")
    _ask(*enter, "ip", "link", "set", "lo", "up")
    made = subprocess.run([*enter, "ip", "link", "add", "eth0", "type", "veth", "peer", "name", "peer0"],
                          capture_output=True, timeout=SECONDS, check=False)  # fmt: skip
    if made.returncode == 0:
        for line in (f"addr add 172.17.0.{number + 2}/16 dev eth0", "link set eth0 up", "link set peer0 up netns 1",
                     "route add default via 172.17.0.1"):  # fmt: skip
            _ask(*enter, "ip", *line.split())


def settle(machine: Machine, repository: Path, description: Description, rng: random.Random) -> None:
    """What a description says, done by the machine's own programs."""
    merged, persona = machine.folder / "merged", machine.persona
    home = merged / "tmp/plan/home"
    for name in persona.folders:
        (home / name).mkdir(parents=True)
    for name, text in persona.files.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
    machine.run(_PLAN, 0, USER_NAME=persona.user)
    commits = _ask("git", "-C", str(repository), "rev-list", "--first-parent", "-n", str(COMMITS), "HEAD").split()
    source = merged / "srv/repo.git"
    _ask("git", "clone", "--quiet", "--bare", str(repository), str(source))
    _ask("git", "--git-dir", str(source), "update-ref", "refs/heads/work", rng.choice(commits))
    _ask("chown", "-R", "1000:1000", str(source))
    origin = _ask("git", "-C", str(repository), "remote", "get-url", "origin").strip()
    age = str(persona.checkout_age or 0)
    machine.run(_CLONE, 1000, DEPTH=str(description.depth), ORIGIN=origin, AGE=age)
    machine.run(_WORK, 1000, PIDS=str(persona.pids))
    shutil.rmtree(source)
    shutil.rmtree(merged / "tmp/plan")
    (merged / "opt/fingerprint.py").write_text(Path(fingerprint.__file__).read_text())


def take(machine: Machine, samples: int) -> list[str]:
    """Lines as `fingerprint.py` prints them, from several terminals."""
    out = machine.folder / "merged/tmp/samples.jsonl"
    each = [samples // SESSIONS + (number < samples % SESSIONS) for number in range(SESSIONS)]
    for count in filter(None, each):
        machine.typed(f"python3 /opt/fingerprint.py --samples {count} >> /tmp/samples.jsonl")
    lines = out.read_text().splitlines()
    if len(lines) != samples:
        raise SystemExit(f"{machine.name} gave {len(lines)} of {samples} samples")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="tree of a distribution, with git and python3")
    parser.add_argument("--repository", type=Path, required=True, help="git repository with a remote named origin")
    parser.add_argument("--description", type=Path, default=REFERENCE)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="folder for the containers; not on an overlay")
    parser.add_argument("--machines", type=int, default=12)
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--seed", default="machines")
    arguments = parser.parse_args()
    description = read(arguments.description)
    with arguments.output.open("a", encoding="utf-8") as file:
        for number in range(arguments.machines):
            seed = hashlib.sha256(f"{arguments.seed} {number}".encode()).digest()
            persona = draw(seed, description)
            with running(number, persona, arguments.root.resolve(), arguments.work.resolve()) as machine:
                settle(machine, arguments.repository.resolve(), description, random.Random(seed))
                for line in take(machine, arguments.samples):
                    file.write(line + "\n")
                file.flush()
            print(f"{number + 1} of {arguments.machines}: {persona.host}", file=sys.stderr)


if __name__ == "__main__":
    main()
