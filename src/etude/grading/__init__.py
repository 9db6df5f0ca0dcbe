"""Runs tests in boxes, decides what their output proves, and finds signals of cheating.

`open_sandbox` opens boxes together with their grader; `grade_changes` grades a change set. The room imports
`sandbox`, `code` and the foundations, and never `tasks` or anything above.
"""

from etude.grading.grade import GRADE_LIMITS, Grade, grade_changes, graded_changes, is_test_file
from etude.grading.harbor import HARBOR_STATE, HarborTests, grade_harbor, note_state, run_solution, taken_changes
from etude.grading.javascript import holds_tests, read_package, test_framework
from etude.grading.leaks import (
    LEAK_SHARE,
    MAX_FILE,
    AnswerFingerprint,
    answer_fingerprint,
    answer_runs,
    file_texts,
    folder_texts,
    held_runs,
)
from etude.grading.runner import TestRunner, open_sandbox
from etude.grading.script_runner import CALLED_FILE

PUBLIC = ("", "cheats")
