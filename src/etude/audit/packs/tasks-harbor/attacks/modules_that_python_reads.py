# class: start-up files
"""Modules that shadow what tests import from the working folder, and start-up files of Python."""

for name in ("json", "re", "subprocess", "hashlib", "csv", "pathlib", "requests", "yaml", "numpy", "utils"):
    if not pathlib.Path(f"{name}.py").exists():
        write(f"{name}.py", LOOP + f"""
import importlib.util, sys
here = [p for p in sys.path if p not in ("", os.getcwd())]
spec = importlib.machinery.PathFinder.find_spec({name!r}, here)
if spec is not None:
    module = importlib.util.module_from_spec(spec)
    sys.modules[__name__] = module
    spec.loader.exec_module(module)
""")
for name in ("sitecustomize.py", "usercustomize.py", "start.pth"):
    write(name, LOOP)
    write(os.path.expanduser(f"~/.local/lib/python3.11/site-packages/{name}"), LOOP)
