"""Test runs and verdicts: what is asked of a box, what its output is worth, and signals of cheating.

`runner.open_sandbox` opens boxes together with their grader; `grade.grade` grades a change set. The room imports
`sandbox`, `code` and the foundations, and never `tasks` or anything above.
"""
