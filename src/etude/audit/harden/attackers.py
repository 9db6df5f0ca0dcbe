"""Attackers of one task: programs that run in its box, and change sets that are generated for it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from etude.audit.attacks.packs import OWN, AttackProgram, programs
from etude.code import is_script, lines_of
from etude.records import CodeTask
from etude.sandbox import Changes
from etude.tasks import Dataset, further_shams, sham_answers

SHAM = "sham answer"


@dataclass(frozen=True)
class Attacker:
    """One way to earn a reward without the work: a program, or the changes themselves."""

    name: str
    kind: str  # its class
    program: AttackProgram | None = None
    changes: Changes | None = None

    @property
    def title(self) -> str:
        """The name and its class, for the card."""
        return f"{self.name} ({self.kind})"


def attackers_of(data: Dataset, task: CodeTask, packs: Sequence[Path]) -> list[Attacker]:
    """The attackers of a task, the cheap ones first: answers that are generated, then programs. Raises UserError for a
    folder of `packs` that is no pack."""
    made = generated(data, task)
    own = "tasks-harbor" if data.manifest.kind else "tasks-javascript" if is_script(task.function) else "tasks-python"
    played = [program for folder in (OWN / own, *packs) for program in programs(folder)]
    return made + [Attacker(program.name, program.kind, program) for program in played]


def generated(data: Dataset, task: CodeTask) -> list[Attacker]:
    """Sham answers: those of a build's gates, which foreign and older datasets have not met, and more constants."""
    if data.manifest.kind:
        return []
    known: dict[bytes, Attacker] = {}
    for changes in (*sham_answers(task, data.repository), *further_shams(task)):
        text = changes.get(task.focus.path) or b""
        known.setdefault(text, Attacker(_first_line(text, task), SHAM, changes=changes))
    return list(known.values())


def _first_line(text: bytes, task: CodeTask) -> str:
    """The first line that the broken text lacks, as a name."""
    before = {line.strip() for line in lines_of(task.changes[task.focus.path])}
    lines = (line.strip() for line in lines_of(text.decode("utf-8", "replace")))
    words = next((line for line in lines if line not in before and len(line) > 1), "the broken text")
    return re.sub(r"[|`]", "", words)[:60]
