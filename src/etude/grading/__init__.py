"""Runs tests in boxes, decides what their output proves, and finds signals of cheating.

`runner.open_sandbox` opens boxes together with their grader; `grade.grade` grades a change set. The room imports
`sandbox`, `code` and the foundations, and never `tasks` or anything above.
"""

from etude.grading.runner import TestRunner, open_sandbox

PUBLIC = (
    "",
    "cheats",
    "cheats.commands",
    "cheats.decoys",
    "cheats.signals",
    "grade",
    "harbor",
    "javascript",
    "leaks",
    "script_runner",
)
