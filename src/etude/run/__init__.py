"""One run: tasks are played and trained on until the configured steps are done, then a report is written.

Every process of a run is started here; `loop.py` shows how they work together. The room imports all rooms below it;
only commands and audits import it. `launch` trains, `evaluate` measures models, `parts` serves those who
repeat episodes.
"""

PUBLIC = ("engines", "evaluate", "inputs", "launch", "parts", "traces")
