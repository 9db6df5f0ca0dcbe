"""The dashboard: the terminal view while a run goes on, and the page and the report that it leaves behind.

The room draws figures and decides nothing. It imports evals, ledger, rollout's figures and the foundations. `terminal`
is the view, `page` writes the page from a `report`, and `view` reads a run folder.
"""

from etude.dashboard.page import write_report
from etude.dashboard.terminal import LiveView, final_table
from etude.dashboard.text import duration

PUBLIC = ("", "report", "view")
