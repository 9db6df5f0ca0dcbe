"""One run: tasks are played and trained on until the configured steps are done, then a report is written.

Every process of a run is started here; `loop.py` shows how they work together. Commands, the live loop and audits
import the room. `api` trains and measures from Python, `launch` trains, `evaluate` measures models, `parts` makes
renderers and contexts, for audits too; `jobs` are those of a fleet.
"""

PUBLIC = ("api", "engines", "evaluate", "inputs", "jobs", "launch", "parts", "traces", "vllm_environment")
