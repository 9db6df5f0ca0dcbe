"""The properties of a machine that a program can see, as one JSON line per sample. Standard library only.

    python3 fingerprint.py --samples 20 >> fingerprints.jsonl

Run it in the folder of a repository, in a terminal, on machines that people work on. It reads and never writes, except
for one small temporary file that it times. A line holds counts, times, versions, and names from fixed lists: no host
name, user name, address, path or file content, and of environment variables no value but the kind of terminal, the
language and the name of the shell. Read it before you hand it on.

    {"format": 2, "machine": "3f1c...", "probes": {"uptime": 81234.5, "tools": ["git", "make"], ...}}

`machine` is a hash that identifies the machine and reveals nothing else. A probe that fails is left out.

    python3 fingerprint.py --requests chats.jsonl >> fingerprints.jsonl

prints samples of a product's requests to its model instead, from one body of OpenAI's chat completions per line. They
hold hashes of the system prompt and of each tool, and the length of the user's first message. `machine` is then a hash
of the conversation.
"""

import argparse
import contextlib
import glob
import hashlib
import json
import os
import platform
import pwd
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time

FORMAT = 2
SECONDS = 10.0  # of any program


def words(text):
    """Words of a text, apart at spaces."""
    return text.split()


TOOLS = words(
    """
    apt awk cargo cc code curl docker emacs file gcc gdb gh git go htop ip java jq less lsof make man mysql nano
    nc node npm perl pip pip3 pnpm podman ps psql python3 rg rsync ruby screen ssh strace sudo systemctl tmux
    top tree unzip uv vi vim wget which yarn zip zsh
    """
)
DOTFILES = words(
    """
    .bash_history .bash_logout .bash_profile .bashrc .cache .cargo .config .docker .gitconfig .gnupg .ipython
    .kube .local .npm .npmrc .nvm .oh-my-zsh .profile .pyenv .python_history .ssh .tmux.conf .vim .viminfo
    .vimrc .vscode .vscode-server .zsh_history .zshrc
    """
)
PROCESSES = words(
    """
    Xorg agetty bash code containerd cron dbus-daemon dockerd emacs firefox gnome-shell init login node postgres
    python python3 rsyslogd sh sshd sudo systemd systemd-journal systemd-logind systemd-udevd tmux zsh
    """
)
KERNEL_WORDS = words(
    """
    BOOT_IMAGE console crashkernel cryptdevice init initrd intel_iommu mitigations net.ifnames nomodule panic pci quiet
    rd.luks.uuid rdinit reboot resume rhgb ro root rootflags rw splash systemd.unified_cgroup_hierarchy vt.handoff
    """
)
VARIABLES = words(
    """
    BASH_ENV COLORTERM DBUS_SESSION_BUS_ADDRESS DISPLAY EDITOR GIT_EDITOR HISTCONTROL HISTSIZE HOME HOSTNAME
    HTTPS_PROXY HTTP_PROXY LANG LANGUAGE LC_ALL LC_CTYPE LESS LESSOPEN LOGNAME LS_COLORS MAIL NVM_DIR OLDPWD
    PAGER PATH PS1 PWD PYTHONDONTWRITEBYTECODE PYTHONHASHSEED PYTHONPATH SHELL SHLVL SSH_AUTH_SOCK SSH_CLIENT
    SSH_CONNECTION SSH_TTY TERM TERM_PROGRAM TMUX TZ USER VIRTUAL_ENV VISUAL XDG_DATA_DIRS XDG_RUNTIME_DIR
    XDG_SESSION_ID XDG_SESSION_TYPE _ http_proxy https_proxy
    """
)


def read(path, size=1 << 16):
    """The first `size` characters of a file."""
    with open(path, "rb") as file:
        return file.read(size).decode("utf-8", "replace")


def output(*command):
    """The output of a program; empty if the program fails."""
    done = subprocess.run(command, capture_output=True, timeout=SECONDS, text=True, stdin=subprocess.DEVNULL)
    return done.stdout if done.returncode == 0 else ""


def shape(text):
    """The pattern of a name: runs of letters become `a`, runs of digits `9`."""
    return re.sub(r"[0-9]+", "9", re.sub(r"[A-Za-z]+", "a", text))[:20]


def known(name):
    """A name if it is a common one, else "another"."""
    return name if name in PROCESSES else "another"


def field(text, name):
    """The value of a field "name: value" in a text."""
    match = re.search(rf"^{name}:?\s+(.*)$", text, re.MULTILINE)
    return match.group(1).strip() if match else None


def identity():
    """Probes of host, user and accounts."""
    account = pwd.getpwuid(os.getuid())
    owners = [
        os.stat(p).st_uid for p in ("/", "/etc", "/usr", "/usr/bin", "/bin/sh", "/tmp", "/home") if os.path.exists(p)
    ]
    known = {entry.pw_uid for entry in pwd.getpwall()} - {65534}
    release = {name: value for name, _, value in (line.partition("=") for line in read("/etc/os-release").splitlines())}
    yield "host.shape", shape(socket.gethostname())
    yield "host.in_hosts", socket.gethostname() in read("/etc/hosts").split()
    yield "user.uid", os.getuid()
    yield "user.home_matches", account.pw_dir == os.environ.get("HOME")
    yield "user.groups", len(os.getgroups())
    yield "accounts", len(pwd.getpwall())
    yield "owners.unknown", sum(owner not in known for owner in owners) / len(owners)
    yield "system", (release.get("ID", "") + release.get("VERSION_ID", "")).replace('"', "")


def settings():
    """Probes of /etc."""
    yield "etc.entries", len(os.listdir("/etc"))
    yield "machine_id", len(read("/etc/machine-id").strip())


def times():
    """Probes of clocks and dates."""
    uptime = float(read("/proc/uptime").split()[0])
    booted = int(field(read("/proc/stat", 1 << 20), "btime") or 0)
    first = read("/proc/1/stat").rpartition(")")[2].split()
    here = [entry.stat(follow_symlinks=False).st_mtime for entry in os.scandir(".")]
    yield "uptime", uptime
    yield "uptime.agrees", abs(time.time() - booted - uptime) < 5
    yield "pid1.late", float(first[19]) / os.sysconf("SC_CLK_TCK")
    yield "files.spread", max(here) - min(here) if here else 0.0
    yield "files.age", time.time() - max(here) if here else 0.0


def processes():
    """Probes of pid 1, the other processes and the parent."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    names = []
    for pid in pids:
        with contextlib.suppress(OSError):
            names.append(read(f"/proc/{pid}/comm").strip())
    line = read("/proc/1/cmdline")
    yield "pid1.name", known(read("/proc/1/comm").strip())
    yield "pid1.line", len(line)
    yield "pid1.program", known(os.path.basename(line.split("\0")[0]))
    yield "processes", len(pids)
    yield "processes.names", sorted(set(names) & set(PROCESSES))
    yield "pid.self", os.getpid()
    yield "parent.name", known(read(f"/proc/{os.getppid()}/comm").strip())
    yield "parent.line", len(read(f"/proc/{os.getppid()}/cmdline"))


def kernel():
    """Probes of kernel, processor and memory."""
    yield "kernel", ".".join(platform.release().split(".")[:2])
    yield "kernel.flavour", shape(platform.release())
    yield "kernel.line", sorted({word.partition("=")[0] for word in read("/proc/cmdline").split()} & set(KERNEL_WORDS))
    yield "cpu.hypervisor", "hypervisor" in (field(read("/proc/cpuinfo"), r"flags\s*") or "")
    yield "cpu.model", shape(field(read("/proc/cpuinfo"), r"model name\s*") or "")
    yield "cpu.count", os.cpu_count()
    yield "memory", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield "load", float(read("/proc/loadavg").split()[0])


def confinement():
    """Probes of capabilities, control groups, mounts and namespaces."""
    status = read("/proc/self/status")
    for name in ("NoNewPrivs", "Seccomp", "CapEff", "CapBnd"):
        yield f"status.{name}", field(status, name)
    yield "cgroup", shape(read("/proc/self/cgroup").strip().rpartition(":")[2])
    mounts = [line.split() for line in read("/proc/self/mounts", 1 << 20).splitlines()]
    yield "mounts", len(mounts)
    yield "mounts.types", sorted({mount[2] for mount in mounts})
    yield "mounts.root", next(mount[2] for mount in mounts if mount[1] == "/")
    yield "namespaces", read("/proc/self/uid_map").split()[2]


def firmware():
    """A probe of the hardware's firmware."""
    present = os.path.exists("/sys/class/dmi")
    yield "firmware", shape(read("/sys/class/dmi/id/sys_vendor").strip()) if present else "none"


def terminal():
    """Probes of environment and terminal."""
    yield "environment", sorted(set(os.environ) & set(VARIABLES))
    yield "environment.count", len(os.environ)
    yield "terminal", [os.isatty(fd) for fd in range(3)].count(True)
    yield "terminal.kind", os.environ.get("TERM", "none")[:20]
    yield "language", os.environ.get("LANG", "none")[:20]
    yield "shell", os.path.basename(os.environ.get("SHELL", "none"))[:20]
    yield "path", len(os.environ.get("PATH", "").split(":"))
    mask = os.umask(0o022)
    os.umask(mask)
    yield "umask", mask
    size = os.get_terminal_size(0)
    yield "terminal.rows", size.lines
    yield "terminal.columns", size.columns


def home():
    """Probes of the home folder."""
    folder = os.path.expanduser("~")
    yield "dotfiles", [name for name in DOTFILES if os.path.exists(os.path.join(folder, name))]
    yield "home.entries", len(os.listdir(folder))
    history = os.path.join(folder, ".bash_history")
    yield "history", read(history, 1 << 22).count("\n") if os.path.exists(history) else 0


def network():
    """Probes of interfaces, routes and sockets."""
    names = [line.partition(":")[0].strip() for line in read("/proc/net/dev").splitlines()[2:]]
    yield "interfaces", sorted({shape(name) for name in names})
    yield "routes", len(read("/proc/net/route").splitlines()) - 1
    yield "resolver", os.path.exists("/etc/resolv.conf")
    yield "sockets", len(read("/proc/net/unix", 1 << 20).splitlines())


def repository():
    """Probes of the work tree and the tools."""
    yield "git", os.path.isdir(".git")
    if os.path.isdir(".git") and shutil.which("git"):
        yield "git.commits", int(output("git", "rev-list", "--count", "HEAD") or 0)
        yield "git.authors", len(set(output("git", "log", "-500", "--format=%ae").split()))
        yield "git.remotes", len(output("git", "remote").split())
        yield "git.branches", len(output("git", "branch").splitlines())
        yield "git.dirty", len(output("git", "--no-optional-locks", "status", "--porcelain").splitlines())
        yield "git.age", time.time() - int(output("git", "log", "-1", "--format=%ct") or 0)
    yield "tools", [name for name in TOOLS if shutil.which(name)]
    yield "tools.python", platform.python_version()
    yield "tools.packages", len(glob.glob("/usr/lib/python3/dist-packages/*")) > 0
    yield "editor.folder", os.path.isdir(".vscode") or os.path.isdir(".idea")


def disk():
    """Probes of disk and resource limits."""
    status = os.statvfs(".")
    yield "disk.size", status.f_blocks * status.f_frsize
    yield "disk.free", status.f_bavail / max(status.f_blocks, 1)
    yield "disk.inodes", status.f_files
    for name in ("AS", "CORE", "CPU", "FSIZE", "NOFILE", "NPROC"):
        limit = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[0]
        yield f"limits.{name}", "unlimited" if limit == resource.RLIM_INFINITY else limit


def latency():
    """Probes of latency in milliseconds: the least of a few, since any machine may be busy."""
    yield "latency.program", least(lambda: subprocess.run(["true"], check=True), 5)
    yield "latency.python", least(lambda: subprocess.run([sys.executable, "-I", "-S", "-c", ""], check=True), 3)
    yield "latency.stat", least(lambda: [os.stat("/usr/bin") for _ in range(200)], 5)
    yield "latency.call", least(lambda: [os.getppid() for _ in range(2000)], 5)
    with tempfile.TemporaryDirectory() as folder:
        yield "latency.write", least(lambda: write(os.path.join(folder, "x")), 5)


def write(path):
    """Write a small file."""
    with open(path, "wb") as file:
        file.write(b"x" * 4096)


def least(work, count):
    """The shortest of `count` times that `work` takes, in milliseconds."""
    best = float("inf")
    for _ in range(count):
        started = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started)
    return best * 1000


PARTS = (
    identity,
    settings,
    times,
    processes,
    kernel,
    confinement,
    firmware,
    terminal,
    home,
    network,
    repository,
    disk,
    latency,
)


def sample():
    """Probes by name; of a part that fails, the probes before the failure are kept."""
    values = {}
    for part in PARTS:
        with contextlib.suppress(Exception):
            values.update(part())
    return values


def machine():
    """A hash that identifies the machine."""
    text = socket.gethostname()
    with contextlib.suppress(OSError):
        text += read("/etc/machine-id")
    return hashlib.sha256(f"etude fingerprint {text}".encode()).hexdigest()[:16]


def line():
    """One sample as a line of JSON."""
    return json.dumps({"format": FORMAT, "machine": machine(), "probes": sample()})


def digest(value):
    """A short hash of a value, which does not reveal the value."""
    return hashlib.sha256(f"etude fingerprint {json.dumps(value, sort_keys=True)}".encode()).hexdigest()[:16]


def request(body):
    """The probes of a request to a model, and a hash of its conversation."""
    system, user = [], []
    for message in body["messages"]:
        content = message.get("content") or ""
        content = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
        if message["role"] in ("system", "developer"):
            system.append(content)
        elif message["role"] == "user":
            user.append(content)
    first = user[0]
    return {
        "prompt.system": digest(system),
        "prompt.tools": [digest(tool) for tool in body.get("tools") or ()],
        "request.words": len(first.split()),
        "request.lines": first.count("\n") + 1,
        "request.code": "```" in first,
    }, digest(first)


def main():
    """Print fingerprints of this machine, or of requests."""
    parser = argparse.ArgumentParser(description="Print fingerprints of this machine, one JSON object per line.")
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--requests", metavar="FILE", help="bodies of chat completions, one per line, instead")
    arguments = parser.parse_args()
    if arguments.requests is None:
        for _ in range(arguments.samples):
            print(line(), flush=True)
        return
    try:
        with open(arguments.requests, encoding="utf-8") as file:
            bodies = list(filter(str.strip, file))
    except (OSError, UnicodeDecodeError) as e:
        parser.error(f"{arguments.requests} cannot be read ({e}); give a file of chat completions, one body per line")
    lines = []
    for number, body in enumerate(bodies, 1):
        try:
            probes, conversation = request(json.loads(body))
        except (ValueError, LookupError, TypeError, AttributeError):
            parser.error(f"body {number} of {arguments.requests} is no chat completion with a user's message; mend it")
        lines.append(json.dumps({"format": FORMAT, "machine": conversation, "probes": probes}))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
