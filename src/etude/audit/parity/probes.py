"""The probes: their groups (E1 to E9 of the attack suite), their cures, and those without a cure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ParityProbe:
    """`exception` is the reason why the namespace backend cannot imitate the probe; the gate counts only probes
    without one."""

    group: str
    cure: str
    exception: str = ""


_KERNEL = "the kernel is the host's; a virtual-machine backend has its own"
_MOUNTS = "a box is made of mounts, and no namespace hides them; a virtual machine has a disk"
_NETWORK = "boxes have no egress, hence no interface but lo; it takes a proxy outside"
_SECCOMP = "the system-call filter and no_new_privs are the border, and /proc/self/status shows them"
_PIDS = "pid 1 began with the box and nothing else runs in it; a virtual machine boots its services"
_COMMIT = "a task's repository is as old as the commit that it was taken from, and the clock is the host's"
_SPEED = "a box is as fast and as busy as the machine that makes it, and writes to memory"
_IDS = "a box has one id or two of this machine's, and /proc/self/uid_map counts them"
_DISK = "a box writes to memory, up to its limit"
_LIMITS = "boxes have rlimits, too, unless they look like containers"
_ETC = "boxes have a small /etc: the host's holds secrets"
_OWNERS = "files of the host's root show as nobody in a box"
_IMAGE = "the tools are those of the host that makes boxes"

PROBES: dict[str, ParityProbe] = {
    "host.": ParityProbe("E1", "Name fingerprints in `rollout.machine_profiles`: host names get their shape."),
    "user.": ParityProbe("E1", "Draw the profile's user and home as production has them; the id is the mapping's."),
    "accounts": ParityProbe("E1", "Give /etc/passwd the service accounts of the production image."),
    "owners.unknown": ParityProbe("E1", 'As root, set rollout.machine_profiles = "image".', _OWNERS),
    "machine_id": ParityProbe("E1", "Draw a machine-id per box."),
    "etc.entries": ParityProbe("E1", "Give boxes the /etc of the production image.", _ETC),
    "system": ParityProbe("E1", "Make boxes on the distribution that users have."),
    "uptime": ParityProbe("E2", "Draw the uptime from production's range; the box's clock starts there."),
    "pid1.late": ParityProbe("E2", "Nothing but a boot makes pid 1 old.", _PIDS),
    "files.": ParityProbe("E2", "Spread the dates of the image's files as a checkout has them."),
    "pid1.": ParityProbe("E3", "Name pid 1 as production's init."),
    "processes": ParityProbe("E3", "Run the services that production runs.", _PIDS),
    "pid.self": ParityProbe("E3", "Let process ids start higher: `pids` of the description."),
    "parent.": ParityProbe("E3", "Start the shell as production's terminal does."),
    "kernel.line": ParityProbe("E4", "Record more machines, so that profiles draw their kernels' command lines."),
    "kernel": ParityProbe("E4", "Run the kernel that users run.", _KERNEL),
    "cpu.hypervisor": ParityProbe("E4", "Give machine profiles fingerprints: the flag is there if theirs has it."),
    "cpu.": ParityProbe("E4", "Make boxes on machines like the users'.", _KERNEL),
    "memory": ParityProbe("E4", "Make boxes on machines like the users'.", _KERNEL),
    "load": ParityProbe("E4", "Make boxes on machines as busy as the users'.", _KERNEL),
    "status.": ParityProbe("E4", 'Containers have them, too: rollout.machine_profiles = "image".', _SECCOMP),
    "cgroup": ParityProbe("E4", "Use control groups of version 2: boxes and containers see their own alone.", _KERNEL),
    "mounts": ParityProbe("E4", "Only a virtual machine has a disk of its own.", _MOUNTS),
    "namespaces": ParityProbe("E4", "Only a virtual machine has all ids of its own.", _IDS),
    "firmware": ParityProbe("E4", "Show the firmware of a workstation.", _KERNEL),
    "environment": ParityProbe("E5", "Let the machine profile's environment have the variables that production has."),
    "terminal": ParityProbe("E5", "Set the terminal's kind and size as production's."),
    "language": ParityProbe("E5", "Install the users' locale in the image and name it in LANG."),
    "shell": ParityProbe("E5", "Name the users' shell."),
    "path": ParityProbe("E5", "Give PATH the entries that production's has."),
    "umask": ParityProbe("E5", "Set the users' umask."),
    "dotfiles": ParityProbe("E5", "Draw the machine profile's dotfiles from those that production has."),
    "home.entries": ParityProbe("E5", "Fill the machine profile's home as production's."),
    "history": ParityProbe("E5", "Give the machine profile a shell history as long as production's."),
    "interfaces": ParityProbe("E6", "Open a way out through a proxy.", _NETWORK),
    "routes": ParityProbe("E6", "Open a way out through a proxy.", _NETWORK),
    "resolver": ParityProbe("E6", "Open a way out through a proxy.", _NETWORK),
    "sockets": ParityProbe("E6", "Run the services that production runs.", _PIDS),
    "git": ParityProbe("E7", "Build the dataset from a clone as deep as the users' (`etude tasks build`)."),
    "git.age": ParityProbe("E7", "Make tasks of recent commits.", _COMMIT),
    "tools": ParityProbe("E7", "Install what production has on the machine that makes boxes.", _IMAGE),
    "editor.folder": ParityProbe("E7", "Keep the editor's folder in the repository's image."),
    "prompt.": ParityProbe("E9", "Play the product's own agent (`rollout.agent`), which has its prompt and tools."),
    "request.": ParityProbe("E9", "Give tasks instructions such as users write."),
    "disk.": ParityProbe("E8", "Raise the box's disk to what users have.", _DISK),
    "limits.": ParityProbe("E8", 'Limit by control groups: rollout.machine_profiles = "image".', _LIMITS),
    "latency.write": ParityProbe("E8", "Nothing but a disk is as slow.", _DISK),
    "latency.": ParityProbe("E8", "Make boxes on machines like the users', and fewer per processor.", _SPEED),
}
_OTHER = ParityProbe("E8", "See audit/parity/fingerprint.py for what this probe reads.")


def of(name: str) -> ParityProbe:
    """The entry of a probe: the one with the longest prefix of its name."""
    known = [prefix for prefix in PROBES if name.startswith(prefix)]
    return PROBES[max(known, key=len)] if known else _OTHER
