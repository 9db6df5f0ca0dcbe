"""One run: tasks are played and trained on until the configured steps are done, then a report is written.

Every process of a run is started here; `loop.py` shows how they work together. The room imports all rooms below it;
only commands and audits import it. Public: `launch.train_rl`, `evaluate.evaluate_models`, and `parts` for those who
repeat episodes.
"""

PUBLIC = ("engines", "evaluate", "inputs", "launch", "parts", "traces")
