#!/usr/bin/env python3
"""Runs in a box in place of the programs that foreign tasks install software with. No program installs anything: the
packages that the task's Dockerfile and tests name are installed already, and any other is refused as it would be
without a network.

The name by which this file is called selects the program: apt-get, apt, curl, uv, uvx, pip, pip3 or pytest.
"""

import json
import os
import sys

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VALUED = {"-p", "--python", "-w", "--with", "--from", "--with-requirements", "--index-url", "--directory", "--project"}


def main(name: str, words: list[str]) -> int:
    """Run the program `name`. Returns the exit status."""
    if name in ("apt-get", "apt"):
        return apt(words)
    if name == "curl":
        if any("astral.sh/uv" in word for word in words):  # the installer of uv: later commands read its settings
            print('mkdir -p "$HOME/.local/bin" && : > "$HOME/.local/bin/env"')
            return 0
        return run(["/usr/bin/curl", *words])
    if name in ("pip", "pip3"):
        return run([sys.executable, "-m", "pip", *words])
    if name == "pytest":
        return run([sys.executable, "-P", "-m", "pytest", *words])  # -P: the working folder stays out of the path
    if name == "uvx":
        return tool(words)
    if words[:2] == ["tool", "run"]:
        return tool(words[2:])
    if words[:1] == ["run"]:
        return tool(words[1:])
    if words[:1] == ["pip"]:
        return run([sys.executable, "-m", "pip", *(word for word in words[1:] if word != "--system")])
    return 0 if words[:1] in (["venv"], ["init"], ["sync"], ["add"], ["--version"]) else 1


def apt(words: list[str]) -> int:
    """Accept packages that are installed; fail for any other."""
    plain = [word for word in words if not word.startswith("-")]
    if plain[:1] != ["install"]:
        return 0
    with open(f"{HERE}/packages.json", encoding="utf-8") as file:
        known = set(json.load(file))
    for package in plain[1:]:
        if package.partition("=")[0] not in known:
            print(f"E: Unable to locate package {package}", file=sys.stderr)
            return 100
    return 0


def tool(words: list[str]) -> int:
    """Run a command, without the options of uvx before it."""
    while words and words[0].startswith("-"):
        words = words[2:] if words[0] in VALUED else words[1:]
    if not words:
        return 0
    words = [words[0].partition("@")[0], *words[1:]]
    return run([sys.executable, *words[1:]] if words[0] in ("python", "python3") else words)


def run(words: list[str]) -> int:
    """Replace this process by another program."""
    try:
        os.execvp(words[0], words)
    except OSError as e:
        print(f"{words[0]}: {e.strerror}", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main(os.path.basename(sys.argv[0]), sys.argv[1:]))
