"""Attacks on the owner of a box: through its files, its terminal, its limits and its neighbours.

Each returns the problem, or "" if there is none. `CHECKS` maps items of the suite to attacks.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from etude.sandbox import Box, BoxError, Escape, Image, Limits, NoSpace, NotFound, NotRegular, Sandbox, TooLarge

LIMITS = Limits(memory_mb=512, processes=48, disk_mb=16)
SECONDS = 60.0


async def _refused(work: Awaitable[object], *errors: type[BoxError]) -> str:
    started = time.monotonic()
    try:
        await work
    except errors:
        slow = time.monotonic() - started > SECONDS / 2
        return "refused too late" if slow else ""
    except BoxError as e:
        return f"{type(e).__name__} instead of {errors[0].__name__}"
    return f"not refused with {errors[0].__name__}"


async def siblings(sandbox: Sandbox, image: Image, box: Box) -> str:
    """Marks in shared places must not be seen by the next box."""
    place = "import socket; s = socket.socket(socket.AF_UNIX); s.bind(chr(0) + 'etude-mark')"
    await box.exec("touch /tmp/etude-mark /dev/shm/etude-mark /var/tmp/etude-mark etude-mark ~/etude-mark", SECONDS)
    await box.exec(
        f'python3 -c "{place}; print(1, flush=True); import time; time.sleep(60)" > /tmp/log & sleep 0.5', SECONDS
    )
    other = await sandbox.create(image, LIMITS)
    try:
        look = "find / /tmp /dev/shm /workspace -xdev -name etude-mark 2>/dev/null; grep etude-mark /proc/net/unix"
        return (await other.exec(look, SECONDS)).output
    finally:
        await other.close()


async def repositories(_: Sandbox, __: Image, box: Box) -> str:
    """A repository whose configuration makes git run programs: the owner never runs git."""
    line = (
        "mkdir -p .git && printf '[core]\\nfsmonitor = touch /tmp/etude-attack-escaped\\n' > .git/config;"
        "printf '[filter \"x\"]\\nclean = touch /tmp/etude-attack-escaped\\n' >> .git/config;"
        "echo '* filter=x diff=x' > .gitattributes"
    )
    await box.exec(line, SECONDS)
    changes = await box.changes()
    return "" if ".gitattributes" in changes else "the files were not reported"


async def links(_: Sandbox, __: Image, box: Box) -> str:
    """C2: links to files of the system are neither read, written through, nor submitted."""
    await box.exec(
        "ln -s /etc/passwd link; ln -s /etc folder; ln -s ../../etc/passwd src/up; ln /etc/passwd hard", SECONDS
    )
    wrong = [await _refused(box.read(path), Escape) for path in ("link", "folder/passwd", "src/up", "../etc/passwd")]
    wrong += [await _refused(box.write(path, b"x"), Escape, NotRegular) for path in ("link", "folder/x")]
    changes = await box.changes()
    return "; ".join(filter(None, wrong)) or (
        "a link was handed in" if {"link", "hard", "src/up"} & set(changes) else ""
    )


async def special_files(_: Sandbox, __: Image, box: Box) -> str:
    """C3: pipes and sockets are neither read nor submitted."""
    await box.exec("mkfifo pipe; python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"sock\")'", SECONDS)
    wrong = [await _refused(box.read(path), NotRegular, NotFound) for path in ("pipe", "sock", "src")]
    changes = await box.changes()
    return "; ".join(filter(None, wrong)) or ("a special file was handed in" if {"pipe", "sock"} & set(changes) else "")


async def masses(_: Sandbox, __: Image, box: Box) -> str:
    """C4: deep folders and huge files are refused, not read."""
    await box.exec("mkdir -p $(seq -s/ 70)", SECONDS)
    wrong = await _refused(box.changes(), TooLarge)
    await box.exec("rm -rf 1; truncate -s 10G huge; truncate -s 15M large", SECONDS)
    return wrong or await _refused(box.changes(), TooLarge)


async def names(_: Sandbox, __: Image, box: Box) -> str:
    """C5: files with hostile names are reported under those names."""
    long = "n" * 250
    await box.exec(
        f"printf x > $'a\\nb'; printf x > $'\\xff'; printf x > -dash; printf x > {long}; printf x > $'\\u202egpj'",
        SECONDS,
    )
    wanted = {"a\nb", "\udcff", "-dash", long, "\u202egpj"}
    missing = wanted - set(await box.changes())
    return f"not listed: {missing!r}" if missing else ""


async def bombs(sandbox: Sandbox, image: Image, box: Box) -> str:
    """Processes, memory, disk and files; a neighbour must still get its answers."""
    wrong = []
    forks = 'python3 -c \'import subprocess\nfor _ in range(200): subprocess.Popen(["sleep", "60"])\'; kill -9 -1'
    if "temporarily unavailable" not in (await box.exec(forks, SECONDS)).output:
        wrong.append("processes are not limited")
    if "MemoryError" not in (await box.exec("python3 -c 'bytes(2 << 30)'", SECONDS)).output:
        wrong.append("memory is not limited")
    if "No space left" not in (await box.exec("head -c 64M /dev/zero > /tmp/big; rm -f /tmp/big", SECONDS)).output:
        wrong.append("the disk is not limited")
    files = 'python3 -c \'for i in range(40000): open("/tmp/%d" % i, "w").close()\''
    done = await box.exec(files, SECONDS)
    if "files" in sandbox.capabilities().limits and "No space left" not in done.output:
        wrong.append("files are not limited")
    other = await sandbox.create(image, LIMITS)
    try:
        if (await other.exec("echo alive", SECONDS)).output != "alive\n":
            wrong.append("a neighbour does not answer")
    finally:
        await other.close()
    return "; ".join(wrong)


async def shells(_: Sandbox, __: Image, box: Box) -> str:
    """C7: a shell that is killed, closed, stopped or flooded is replaced."""
    await box.exec("kill -9 -1", SECONDS)
    await box.exec("kill -9 $$", SECONDS)
    await box.exec("exec 0<&- 1>&- 2>&-", SECONDS)
    await box.exec("python3 -c 'import termios; termios.tcflow(0, termios.TCOOFF)'", SECONDS)
    noise = await box.exec("head -c 4000000 /dev/zero | tr '\\0' x", SECONDS)
    done = await box.exec("echo alive", SECONDS)
    return (
        "" if done.output == "alive\n" and done.rc == 0 and noise.cut > 0 else f"{done.rc} {done.output!r} {noise.cut}"
    )


async def terminals(_: Sandbox, __: Image, box: Box) -> str:
    """C8: control sequences, and input pushed to the terminal, do not reach the reader."""
    inject = "import fcntl\ntry: fcntl.ioctl(0, 0x5412, b'x'); print('typed')\nexcept OSError: pass"
    done = await box.exec(
        f'python3 -c "{inject}"; printf "\\033]52;c;AAAA\\007\\033[2J\\033]0;t\\007\\000\\b"', SECONDS
    )
    return repr(done.output) if done.output.strip() else ""


async def markers(_: Sandbox, __: Image, box: Box) -> str:
    """C10: exit codes that commands print are not taken for the real ones."""
    forge = (
        "import os\nfor fd in range(3, 200):\n try: os.write(fd, b'99 0\\0' * 50)\n except OSError: pass\n"
        "raise SystemExit(5)"
    )
    lines = (f'python3 -c "{forge}"', "printf '9 0\\0' >&9", "echo '__END__ 0'; false")
    codes = [(await box.exec(line, SECONDS)).rc for line in lines]
    return "" if codes == [5, 1, 1] else f"exit codes {codes}"


async def arguments(_: Sandbox, __: Image, box: Box) -> str:
    """C14: arguments that are too long, or leave the repository, are refused."""
    wrong = [
        await _refused(box.exec("true #" + "x" * 10_000_000, SECONDS), TooLarge),
        await _refused(box.write("big", bytes(11 << 20)), TooLarge, NoSpace),
        await _refused(box.write("a\0b", b""), Escape),
        await _refused(box.write("../../x", b""), Escape),
        await _refused(box.read("/etc/passwd"), Escape),
    ]
    return "; ".join(filter(None, wrong))


CHECKS: dict[str, Callable[[Sandbox, Image, Box], Awaitable[str]]] = {
    "A8": siblings,
    "C1": repositories,
    "C2": links,
    "C3": special_files,
    "C4": masses,
    "C5": names,
    "C6": bombs,
    "C7": shells,
    "C8": terminals,
    "C10": markers,
    "C14": arguments,
}
