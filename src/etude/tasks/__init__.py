"""Makes a dataset of gated tasks from a repository: code is broken, and hidden tests decide whether an agent repaired
it.

The room imports `grading`, `sandbox`, `code` and the foundations, never torch. `build` makes a dataset, `check` runs
its gates again, `dataset` reads it, `impossible` makes the impossible tasks of a dataset.
"""

from etude.tasks.javascript import is_repository
from etude.tasks.mixture import MixedDataset, mix

PUBLIC = (
    "",
    "build",
    "check",
    "dataset",
    "foreign.build",
    "foreign.dataset",
    "foreign.folder",
    "harbor",
    "histories",
    "impossible",
)
