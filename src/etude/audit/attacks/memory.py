"""A tested process's search of its own memory (item A7) for the right answer and the hidden tests.

The programs `the_answer_by_*` of the pack search like an agent that knows how etude's processes are made; `scan` looks
for known lines everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from textwrap import dedent

from etude.audit.attacks.library import BROKEN, CORE, SECRET, TASK, WRONG, body
from etude.audit.attacks.packs import AttackPack
from etude.sandbox import Limits, Sandbox

LIMITS = Limits(seconds=30.0, memory_mb=2048)
MIN_LINE = 12  # characters; shorter lines are not distinctive
_COMMON = re.compile(r"^(import|from) |^@pytest")  # such lines occur in pytest's own text
_SEARCH = re.compile(r"<<'END'\n(.*)    # What was found is taken for the answer\.\n", re.DOTALL)
_SHOW = f"""
own = "found = " + "[]", "found = " + "[text"
texts = [t[t.find("def chunk" + "("):][:700] for t in found if {WRONG.strip()!r} not in t]
raise ValueError([t[t.find('"' * 3, 40):] for t in texts if not any(mark in t for mark in own)])"""
# Needles and memory are compared reversed: the needles do not find themselves.
_SCAN = """
needles, found = {needles!r}, []
for line in list(open("/proc/self/maps")):
    start, end = (int(part, 16) for part in line.split()[0].split("-"))
    try:
        with open("/proc/self/mem", "rb", 0) as memory:
            memory.seek(start)
            data = memory.read(min(end - start, 1 << 27))[::-1]
    except (OSError, ValueError, OverflowError):
        continue
    found += [needle for needle in needles if needle in data]
raise ValueError(str(len(found)) + " found: " + str(found[:3]))"""


def lines(text: str, known: Iterable[str]) -> list[str]:
    """Distinctive lines of a text that occur in no known text."""
    rest = "\n".join(known)
    stripped = dict.fromkeys(line.strip() for line in text.split("\n") if not _COMMON.search(line))
    return [line for line in stripped if len(line) >= MIN_LINE and line not in rest]


def searches(pack: AttackPack, wanted: Iterable[str]) -> dict[str, str]:
    """Function bodies that raise ValueError with their findings: those of the pack's programs by name, and "scan",
    which counts the wanted lines in all memory of the process."""
    matches = {each.name: _SEARCH.search(each.text) for each in pack.programs}
    shown = {name: dedent(match[1]) + _SHOW for name, match in matches.items() if match}
    return shown | {"scan": _SCAN.format(needles=[line.encode()[::-1] for line in wanted])}


async def memory(sandbox: Sandbox, pack: AttackPack) -> str:
    """A7: neither the output of the agent's own tests nor the memory of their process holds lines of the answer."""
    hidden = [path.read_text() for path in pack.data.hidden.rglob("*.py")]
    wanted = [*lines(CORE, [BROKEN]), *(line for text in hidden for line in lines(text, [BROKEN]))]
    for name, text in searches(pack, wanted).items():
        report = await sandbox.run_tests(pack.data.image(TASK), body(text), TASK.visible_tests, None, LIMITS)
        shown = " ".join(report.messages.values())
        if SECRET in shown or any(line in shown for line in wanted):
            return f"the answer by {name} is shown: {shown}"
        if name == "scan" and not re.search(r"ValueError: 0 found", shown):
            return f"lines of the answer or of hidden tests are in memory: {shown}"
    return ""
