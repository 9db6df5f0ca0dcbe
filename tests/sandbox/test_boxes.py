"""Boxes as values and live boxes: files, the shell, limits, and what an agent tries against them."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from etude.audit import machine
from etude.cli.doctor_reports import show_machine
from etude.sandbox import kernel, machine_profile
from etude.sandbox.base import (
    Box,
    BoxDead,
    BoxError,
    Busy,
    Escape,
    ExecResult,
    Limits,
    NoSpace,
    NotFound,
    NotRegular,
    TooLarge,
)
from etude.sandbox.shell import shown
from tests.helpers.boxlibrary import BROKEN, CORE, DOCTEST, PATH, Place, as_nobody

Make = Callable[..., Box]


@pytest.fixture(params=["value", "live"])
def make(place: Place, request: pytest.FixtureRequest) -> Iterator[Make]:
    """Makes boxes of the broken library; live ones have run a command."""
    boxes = []

    def new(limits: Limits | None = None) -> Box:
        box = place.run(place.sandbox.create(place.image({PATH: BROKEN}), limits or Limits()))
        boxes.append(box)
        if request.param == "live":
            place.run(box.exec("true", 20))
        return box

    yield new
    for box in boxes:
        place.run(box.close())


@pytest.fixture(scope="module")
def shell(place: Place) -> Iterator[Callable[..., ExecResult]]:
    """Runs lines in one live box."""
    box = place.run(place.sandbox.create(place.image({PATH: BROKEN}), Limits(processes=32, disk_mb=16)))
    yield lambda line, timeout=20.0: place.run(box.exec(line, timeout))
    place.run(box.close())


def test_files(place: Place, make: Make) -> None:
    box = make()
    run = place.run
    assert run(box.read(PATH)) == BROKEN.encode()
    assert run(box.list("")) == ["README.md", "src/"]
    assert run(box.list("src/lib")) == ["__init__.py", "core.py", "numbers.py"]
    assert run(box.changes()) == {}
    run(box.write("src/lib/new/deep.py", b"\x00\xff"))
    run(box.write("./src//lib/core.py", CORE.encode()))
    run(box.delete("README.md"))
    assert run(box.read("src/lib/new/deep.py")) == b"\x00\xff"
    assert run(box.list("")) == ["src/"]
    assert run(box.list("src/lib")) == ["__init__.py", "core.py", "new/", "numbers.py"]
    assert run(box.changes()) == {PATH: CORE.encode(), "README.md": None, "src/lib/new/deep.py": b"\x00\xff"}
    assert run(box.run_tests([DOCTEST], 10)).outcomes == {DOCTEST: "passed"}
    run(box.write(PATH, BROKEN.encode()))
    run(box.delete("src/lib/new/deep.py"))
    assert run(box.changes()) == {"README.md": None}
    assert run(box.run_tests([DOCTEST], 10)).outcomes == {DOCTEST: "failed"}


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda box: box.read("/etc/passwd"), Escape),
        (lambda box: box.read("src/../../etc/passwd"), Escape),
        (lambda box: box.write("a\0b", b""), Escape),
        (lambda box: box.list(".."), Escape),
        (lambda box: box.read("absent"), NotFound),
        (lambda box: box.list("absent"), NotFound),
        (lambda box: box.delete("absent"), NotFound),
        (lambda box: box.read("src"), NotRegular),
        (lambda box: box.delete("src"), NotRegular),
        (lambda box: box.write("src", b""), NotRegular),
        (lambda box: box.write("", b""), NotRegular),
        (lambda box: box.list("README.md"), NotRegular),
        (lambda box: box.write("README.md/x", b""), NotRegular),
        (lambda box: box.read(PATH, 3), TooLarge),
        (lambda box: box.write("big", bytes(11 << 20)), TooLarge),
        (lambda box: box.write("/".join("a" * 99), b""), TooLarge),
        (lambda box: box.write("a" * 256, b""), TooLarge),
    ],
)
def test_refusals_are_the_agents(
    place: Place, make: Make, call: Callable[[Box], object], error: type[BoxError]
) -> None:
    """C2, C14."""
    with pytest.raises(error) as refusal:
        place.run(call(make()))
    assert refusal.value.payer == "agent"


def test_layers_are_out_of_the_boxs_reach(place: Place) -> None:
    """Neither its own writable layer nor what its group shares can be touched but through the work tree."""
    run = place.run
    box = run(place.sandbox.create(place.image({PATH: BROKEN}), Limits()))
    run(box.exec("echo x > mine", 20))
    tries = "ls $d; chmod 700 $d; ls $d/0 $d/upper; touch $d/x"
    done = run(box.exec(f"for d in /run/box /run/lower; do {tries}; done 2>&1 | grep -v -e denied -e Read-only", 20))
    assert done.output == ""
    run(box.close())


def test_a_group_shares_the_files_of_its_task(place: Place) -> None:
    """They are written once, not per box; a box that has replaced one has it alone."""
    run = place.run
    image = place.image({PATH: BROKEN, "big.txt": "x" * (1 << 20)})
    boxes = [run(place.sandbox.create(image, Limits(disk_mb=1))) for _ in range(3)]
    run(boxes[0].write(PATH, CORE.encode()))
    for box in boxes:
        assert run(box.exec("wc -c < big.txt; stat -c %a:%Y big.txt README.md >/dev/null", 20)).output == "1048576\n"
    assert [run(box.read(PATH)) for box in boxes] == [CORE.encode(), BROKEN.encode(), BROKEN.encode()]
    assert [run(box.changes()) for box in boxes] == [{PATH: CORE.encode()}, {}, {}]
    for box in boxes:
        run(box.close())


def test_full_disk(place: Place, make: Make) -> None:
    box = make(Limits(disk_mb=8))
    place.run(box.write("a", bytes(5 << 20)))
    with pytest.raises(NoSpace):
        place.run(box.write("b", bytes(5 << 20)))


def test_closed_boxes(place: Place, make: Make) -> None:
    box = make()
    place.run(box.close())
    place.run(box.close())
    with pytest.raises(BoxDead):
        place.run(box.read(PATH))


def test_state_persists(shell: Callable[..., ExecResult]) -> None:
    assert shell("cd src/lib; export A=5; b=6; alias say=echo; f() { return 7; }").rc == 0
    done = shell("say $A $b; pwd; f")
    assert (done.rc, done.output, done.cut, done.timed_out) == (7, "5 6\n/workspace/src/lib\n", 0, False)
    assert shell("cd /workspace").rc == 0
    assert shell("if true; then").rc == 2
    assert shell("echo 'two\nlines'").output == "two\nlines\n"


@pytest.mark.parametrize("name", ["printf", "builtin", "unset", "eval", "exec", "read", "[[", "time"])
def test_a_function_writes_no_exit_status(place: Place, name: str) -> None:
    box = place.run(place.sandbox.create(place.image({PATH: BROKEN}), Limits()))
    body = "{ command printf '\\n%s 0\\n' \"$__n\" >&9; } 2>/dev/null"
    place.run(box.exec(f"function {name} {body}; alias {name}='{{ :; }}'", 20))
    assert place.run(box.exec("false", 3)).rc in (1, 127, None)
    place.run(box.close())


def test_exit_status_is_out_of_band(shell: Callable[..., ExecResult]) -> None:
    """C10: what programs print or write to descriptors is no status."""
    forge = (
        "import os\nfor fd in range(3, 200):\n try: os.write(fd, b'99 0\\0' * 100)\n except OSError: pass\n"
        "raise SystemExit(5)"
    )
    assert shell(f'python -c "{forge}"').rc == 5
    assert shell("printf '99 0\\0' >&9").rc == 1
    assert shell("printf '__END__ 0\\n'; false").rc == 1
    tries = "for fd in 10 11 12 13 14 15 16; do builtin printf '\\n%s 0\\n.\\n' $__n >&$fd; done 2>/dev/null"
    assert shell(f"{tries}; sleep 0.3; false").rc is None
    assert shell("(exit 3)").rc == 3
    assert shell("TIMEFORMAT='took %0R'; time sleep 0").output == "took 0\n"
    assert shell("time sleep 0").output == "took 0\n"
    assert shell("set -o posix; (exit 4)").rc == 4
    assert shell("shopt -o posix; set +o posix").output == "posix          \ton\n"


def test_output_is_cut_in_the_middle(shell: Callable[..., ExecResult]) -> None:
    done = shell("echo first; head -c 300000 /dev/zero | tr '\\0' x; echo last")
    assert done.cut > 250_000
    assert done.output.startswith("first\nxxx")
    assert done.output.endswith("xxxlast\n")
    assert len(done.output) < 40_000


def test_timeout_ends_the_command_not_the_shell(shell: Callable[..., ExecResult]) -> None:
    shell("keep=8")
    done = shell("echo before; sleep 60", 0.5)
    assert (done.timed_out, done.rc) == (True, 143)
    assert done.output.startswith("before\n")
    assert shell("echo $keep").output == "8\n"


def test_lost_shells_are_replaced(shell: Callable[..., ExecResult]) -> None:
    """C7."""
    assert shell("exit 4").rc == 4
    assert shell("kill -9 $$").rc is None
    spin = shell("while :; do :; done", 0.2)
    assert (spin.timed_out, spin.rc) == (True, None)
    shell("python -c 'import os; os.kill(-1, 9)'")
    shell("exec 0<&- 1>&- 2>&-")
    shell("python -c 'import termios; termios.tcflow(0, termios.TCOOFF)'")
    done = shell("pwd")
    assert (done.rc, done.output) == (0, "/workspace\n")


OWN = {
    *("HOME", "LANG", "LOGNAME", "PATH", "PWD", "PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED", "PYTHONPATH", "SHELL"),
    *("SHLVL", "TERM", "USER", "_", "EDITOR"),
}


def test_a_box_sees_little(shell: Callable[..., ExecResult]) -> None:
    """C15, D1, D2, D4, D7: the probes of the doctor print nothing."""
    assert {name: shell(line).output for name, line in machine.PROBES.items()} == dict.fromkeys(machine.PROBES, "")
    names = shell("env | cut -d= -f1 | sort | tr '\\n' ' '").output.split()
    assert not {"SSH_AUTH_SOCK", "AWS_ACCESS_KEY_ID"} & set(names)
    assert shell('test "${HOSTNAME:-$(hostname)}" = "$(hostname)"').rc == 0, "the persona's, not the host's"
    assert not set(names) - {*OWN, *machine_profile._VALUES, *machine_profile._MORE}
    assert shell("cat /proc/net/unix | tail -n +2").output == ""


CALLS = """
import ctypes, errno, os, socket
libc = ctypes.CDLL(None, use_errno=True)
def call(*arguments):
    ctypes.set_errno(0)
    return errno.errorcode.get(ctypes.get_errno(), "done") if libc.syscall(*arguments) < 0 else "done"
MACHINE = {"x86_64": 0, "aarch64": 1}[os.uname().machine]
for name, numbers in (("unshare", (272, 97)), ("clone", (56, 220)), ("clone3", (435, 435)), ("ptrace", (101, 117)),
                      ("bpf", (321, 280)), ("keyctl", (250, 219)), ("setns", (308, 268)), ("mount", (165, 40)),
                      ("process_vm_readv", (310, 270)), ("pidfd_getfd", (438, 438)), ("io_uring_setup", (425, 425)),
                      ("perf_event_open", (298, 241)), ("userfaultfd", (323, 282)), ("kexec_load", (246, 104))):
    print(name, call(numbers[MACHINE], 0x10000000, 0, 0, 0, 0))
for protocol in range(32):
    try:
        socket.socket(16, socket.SOCK_RAW, protocol)
        print("netlink", protocol)
    except OSError as e:
        if e.errno != errno.EPROTONOSUPPORT: print("netlink", e)
families = [1, 2, 10, 16]
for family in range(64):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):
        try:
            socket.socket(family, kind, 0)
        except OSError as e:
            if family not in families and e.errno != errno.EAFNOSUPPORT: print("family", e)
        else:
            if family not in families: print("family", family)
for name, family in (("packet", 17), ("alg", 38), ("vsock", 40)):
    try:
        socket.socket(family, socket.SOCK_STREAM if name != "packet" else socket.SOCK_RAW)
        print(name, "done")
    except OSError as e:
        print(name, errno.errorcode[e.errno])
for address in ("169.254.169.254", "10.0.0.1", "8.8.8.8"):
    try:
        socket.create_connection((address, 80), 1)
        print(address, "done")
    except OSError as e:
        print(address, errno.errorcode.get(e.errno, e))
import fcntl
try:
    fcntl.ioctl(0, 0x5412, b"x")
    print("TIOCSTI done")
except OSError as e:
    print("TIOCSTI", errno.errorcode[e.errno])
"""


def test_system_calls(place: Place) -> None:
    """D1, D2, D3, D8, C8."""
    box = place.run(place.sandbox.create(place.image(), Limits()))
    place.run(box.write("calls.py", CALLS.encode()))
    done = place.run(box.exec("python calls.py", 20))
    place.run(box.close())
    answers = dict(line.split() for line in done.output.splitlines())
    assert answers.pop("clone3") == "ENOSYS"
    assert answers.pop("netlink") == "0", "routes alone"
    assert "family" not in answers
    assert {answers.pop(name) for name in ("packet", "alg", "vsock")} == {"EAFNOSUPPORT"}
    assert {answers.pop(name) for name in ("169.254.169.254", "10.0.0.1", "8.8.8.8")} == {"ENETUNREACH"}
    assert set(answers.values()) == {"EPERM"}
    assert len(answers) == 14


def test_bombs_are_bounded(place: Place, shell: Callable[..., ExecResult]) -> None:
    """C6: processes, memory, disk; the owner still gets answers."""
    done = shell('python -c \'import subprocess\nfor _ in range(100): subprocess.Popen(["sleep", "60"])\'; kill -9 -1')
    assert "Resource temporarily unavailable" in done.output
    assert "No space left" in shell("head -c 32M /dev/zero > /tmp/big; rm -f /tmp/big").output
    assert "MemoryError" in shell("python -c 'bytes(2 << 30)'").output


def test_special_files_are_data(place: Place, shell: Callable[..., ExecResult]) -> None:
    """C2, C3, C5, B12: links and devices are never followed or read; odd names come back exactly."""
    box = place.run(place.sandbox.create(place.image(), Limits()))
    line = (
        "ln -s /etc/passwd link; ln -s /etc folder; mkfifo pipe; ln -s ../../../../etc/passwd src/up; "
        "rm src/lib/numbers.py; ln -s /etc/passwd src/lib/numbers.py; "
        "printf x > $'a\\nb'; printf y > $'\\xff'; printf z > -dash; "
        "truncate -s 9M sparse; rm -r src/lib/core.py; mkdir src/lib/core.py; printf w > src/lib/core.py/in"
    )
    assert place.run(box.exec(line, 20)).rc == 0
    for path, error in (("link", Escape), ("folder/passwd", Escape), ("src/up", Escape), ("pipe", NotRegular)):
        with pytest.raises(error):
            place.run(box.read(path))
    with pytest.raises((Escape, NotRegular)):
        place.run(box.write("link", b"x"))
    with pytest.raises(Escape):
        place.run(box.write("folder/x", b"x"))
    changes = place.run(box.changes())
    assert changes.pop("sparse") == bytes(9 << 20)
    assert changes == {
        "a\nb": b"x",
        "\udcff": b"y",
        "-dash": b"z",
        PATH: None,
        f"{PATH}/in": b"w",
    }
    assert place.run(box.exec("truncate -s 5G huge", 20)).rc != 0
    place.run(box.exec("mkdir -p $(seq -s/ 70)", 20))
    with pytest.raises(TooLarge):
        place.run(box.changes())
    place.run(box.close())


def test_a_running_command_makes_the_box_busy(place: Place) -> None:
    async def scenario() -> None:
        box = await place.sandbox.create(place.image(), Limits())
        await box.exec("true", 20)
        first = asyncio.create_task(box.exec("sleep 60", 60))
        await asyncio.sleep(0)  # lets it start
        with pytest.raises(Busy):
            await box.exec("true", 1)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        with pytest.raises(BoxDead):
            await box.exec("true", 1)
        await box.close()

    place.run(scenario())


def test_two_boxes_share_nothing(place: Place, shell: Callable[..., ExecResult]) -> None:
    """A8."""
    listen = 'import socket, time; s = socket.socket(socket.AF_UNIX); s.bind(chr(0) + "mine"); print(1, flush=True)'
    shell("touch /tmp/mine /dev/shm/mine; echo x > mine; mkfifo /tmp/ready")
    shell(f"python -c '{listen}; time.sleep(30)' > /tmp/ready & read line < /tmp/ready")
    other = place.run(place.sandbox.create(place.image(), Limits()))
    found = place.run(other.exec("ls -A /tmp /dev/shm; ls mine; cat /proc/net/unix | grep mine; pgrep -c sleep", 20))
    place.run(other.close())
    assert "mine" not in found.output.replace("cannot access 'mine'", "")


def test_the_host_is_as_before(place: Place, library: Path) -> None:
    """H0: the image's files are untouched, and nothing of a closed box is left in the host's mount table."""
    assert (library / "repository" / PATH).read_text() == CORE
    assert not (library / "repository" / "note").exists()
    assert "/run/box" not in Path("/proc/self/mountinfo").read_text()


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\x1b[31mred\x1b[0m\x1b]52;c;AAAA\x07!", "red!"),
        (b"10%\r50%\r100%\n", "100%\n"),
        (b"a\r\nb\x00\x07\n", "a\nb\n"),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b"\x1b]0;title", ""),
    ],
)
def test_terminal_output_is_inert(data: bytes, text: str) -> None:
    """C8."""
    assert shown(data) == text


def test_doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert show_machine(as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"]
    assert {check["name"] for check in found["checks"]} >= {"boxes: isolation", "no network", "live box", "test run"}
    monkeypatch.setattr(kernel.platform, "system", lambda: "Darwin")
    assert show_machine(as_json=False) == 1
    assert "cure: no boxes, since macOS has no Linux namespaces" in capsys.readouterr().out


def test_backends_that_are_not_there_are_no_fault(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def probed() -> list[kernel.MachineCheck]:
        return []

    async def reached() -> dict[str, str]:
        return {"docker": "no daemon answers", "podman": ""}

    monkeypatch.setattr(machine, "requirements", lambda host: [])
    monkeypatch.setattr(machine, "probe", probed)
    monkeypatch.setattr(machine, "reachable", reached)
    monkeypatch.setattr(machine, "read_gpu", lambda: machine.GpuFacts(name="H100"))
    monkeypatch.setattr(machine, "installed", list)
    assert show_machine(as_json=False) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [" ".join(line.split()) for line in shown] == [
        "ok device H100",
        "no backend docker no daemon answers",
        "ok backend podman can be reached",
    ]


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests run without root then")
def test_without_root() -> None:
    """The same backend for a user without privileges, if such a user can reach this Python."""
    program = "import sys; from etude.cli.doctor_reports import show_machine; sys.exit(show_machine(as_json=True))"
    done = as_nobody(program, proof="rootless")
    checks = json.loads(done.stdout)
    assert checks["ok"], done.stdout
    assert {"name": "boxes: rootless", "ok": True, "detail": "yes", "cure": "", "needed": False} in checks["checks"]


def test_the_zygote_has_a_session_of_its_own(place: Place) -> None:
    """Ctrl-C in the owner's terminal goes to the processes of the terminal's session."""
    pid = place.sandbox.zygote_pid
    assert pid is not None
    assert os.getsid(pid) == pid
