"""vLLM in its own Python: whether it is there, its version, and the reason in its log why a server ended."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from etude.code import lines_of
from etude.config import InferenceConfig
from etude.errors import UserError, last_line
from etude.protocol.backends import OLDEST_VLLM

# A line of vLLM's log, without process, level, time and place.
_PREFIX = re.compile(r"^(\([^)]*\) )?(ERROR \S+ \S+ \[[^]]*\] )?")
_ERROR = re.compile(r"[\w.]*(Error|Exception)\b.*: .|what\(\): |main\.py: error: ")
# Errors of processes whose own cause another process had, and who says so.
_FOLLOWS = re.compile(r"root cause|Executor failed|EngineDeadError|BrokenPipeError|ConnectionResetError|EOFError")


def check_python(inference: InferenceConfig) -> None:
    """Raises UserError unless servers of vLLM can be started: inference.python must have a vLLM that is new enough."""
    if inference.engine == "vllm" and not inference.urls:
        vllm_version(inference)


def described(inference: InferenceConfig) -> str:
    """The engine of a run in a line: its Python and version, or what is missing there."""
    if inference.urls:
        return f"engine: {inference.engine}, at {', '.join(inference.urls)} (inference.urls)"
    if inference.engine == "etude":
        return f"engine: etude, in {sys.executable}"
    try:
        return f"engine: vLLM {vllm_version(inference)}, in {vllm_python(inference)}"
    except UserError as e:
        return f"engine: vLLM; missing here: {e}"


def vllm_version(inference: InferenceConfig) -> str:
    """The version of vLLM in inference.python. Raises UserError if there is none, or one that is too old, or built for
    another kind of device."""
    python = vllm_python(inference)
    code = "import importlib.metadata as m; print(m.version('vllm'))"
    try:
        output = subprocess.run(
            [python, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as e:
        why = last_line(getattr(e, "stderr", None) or str(e))
        raise UserError(f"{python} has no vllm ({why}): name another with inference.python") from None
    version, _, build = output.strip().partition("+")
    if tuple(map(int, version.split(".")[:2])) < OLDEST_VLLM:
        raise UserError(f"{python} has vLLM {version}: etude needs {OLDEST_VLLM[0]}.{OLDEST_VLLM[1]}")
    if inference.on_cpu != build.startswith("cpu"):
        kind = "GPUs" if inference.on_cpu else "CPUs"
        raise UserError(
            f"{python} has vLLM {version} for {kind}: inference.device = {inference.device!r} needs another build"
        )
    return version


def vllm_python(inference: InferenceConfig) -> str:
    """The interpreter of the run's vLLM servers. Raises UserError if none is named."""
    python = inference.python or os.environ.get("ETUDE_VLLM_PYTHON")
    if not python:
        raise UserError(
            'inference.engine = "vllm" needs a Python that has it: set inference.python or $ETUDE_VLLM_PYTHON, or give '
            "the inference.urls of servers that run (docs/serving.md)"
        )
    return python


def reason_of(log: str) -> str:
    """The line of a vLLM server's log that says why it ended. A server has several processes, each with a traceback,
    and the last lines are warnings of the interpreter's end."""
    lines = [_PREFIX.sub("", line).strip() for line in lines_of(log)]
    errors = [n for n, line in enumerate(lines) if _ERROR.match(line)]
    if own := [n for n in errors if not _FOLLOWS.search(lines[n])]:
        line, rest = lines[own[-1]], lines[own[-1] + 1 : own[-1] + 2]
        return " ".join([line, *rest]) if "validation error" in line else line
    died = [line for line in lines if "died unexpectedly" in line or "Failed core proc" in line]
    return died[-1] if died else last_line(log)
