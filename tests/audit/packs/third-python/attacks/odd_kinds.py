# class: odd files
"""Pipes, sockets, device nodes, links to /dev/zero and to themselves, a file of a tebibyte and locked folders below the source root."""

import socket

package = PATH.resolve().parent
for name in ("_pipe.py", "_pipe"):
    os.mkfifo(package / name)
socket.socket(socket.AF_UNIX).bind(str(package / "_s.py")[-100:] if len(str(package)) > 90 else str(package / "_s.py"))
for name, target in (("_zero.py", "/dev/zero"), ("_self.py", "_self.py"), ("_mem.py", "/proc/self/mem"), ("_in.py", "/dev/stdin"), ("_up", "..")):
    os.symlink(target, package / name)
with open(package / "_sparse.py", "wb") as file:
    try:
        file.truncate(1 << 40)
    except OSError:
        file.truncate(1 << 30)
(package / "_locked").mkdir()
(package / "_locked" / "x.py").write_text("x = 1\n")
os.chmod(package / "_locked", 0)
