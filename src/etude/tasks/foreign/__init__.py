"""Harbor task folders by other authors: read, given an image without Docker, checked by their own solution, graded.

`folder.py` reads a folder, `dockerfile.py` its Dockerfile, `image.py` makes the tree of its boxes, `build.py` runs the
gates and writes a dataset, `dataset.py` loads a dataset, `closing.py` mends a task. Their tests run in
`grading/harbor.py`. A folder with needs that boxes cannot meet is refused with the reason (`FolderRefused`).
"""

from etude.tasks.foreign.build import build_foreign, check_foreign, trial_lines, trials_as_json, try_folders
from etude.tasks.foreign.closing import close_task
from etude.tasks.foreign.dataset import ForeignDataset, load_any_dataset, write_hardened_foreign
from etude.tasks.foreign.folder import find_folders
