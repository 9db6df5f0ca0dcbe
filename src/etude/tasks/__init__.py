"""Makes a dataset of gated tasks from a repository: code is broken, and hidden tests decide whether an agent repaired
it.

The room imports `grading`, `sandbox`, `code` and the foundations, never torch. `build` makes a dataset, `check` runs
its gates again, `dataset` reads it, `impossible` makes the impossible tasks of a dataset.
"""

from etude.tasks.build import build_dataset, check_operators
from etude.tasks.check import check_dataset
from etude.tasks.dataset import Dataset, load_dataset, read_dataset_manifest
from etude.tasks.harbor import read_harbor_task
from etude.tasks.impossible import make_impossible
from etude.tasks.survey import read_functions, survey_repository

PUBLIC = ("", "foreign", "git_history", "histories")
