"""Makes a dataset of gated tasks from a repository: code is broken, and hidden tests decide whether an agent repaired
it.

The room imports `grading`, `sandbox`, `code` and the foundations, never torch. `build` makes a dataset, `check` runs
its gates again, `dataset` reads it, `impossible` makes the impossible tasks of a dataset.
"""

from etude.tasks.build import build_dataset, check_operators
from etude.tasks.check import check_dataset
from etude.tasks.dataset import Dataset, Hardening, load_dataset, read_dataset_manifest
from etude.tasks.gates import in_order
from etude.tasks.harbor import read_harbor_task
from etude.tasks.hardened import check_place, write_hardened
from etude.tasks.impossible import make_impossible
from etude.tasks.mending import mended, other_failures
from etude.tasks.shams import further_shams, sham_answers
from etude.tasks.survey import read_functions, survey_repository

PUBLIC = ("", "foreign", "git_history", "histories")
