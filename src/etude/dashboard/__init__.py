"""The dashboard: the terminal view while a run goes on, and the page and the report that it leaves behind.

The room draws figures and decides nothing. It imports evals, ledger, rollout's figures and the foundations. Public:
`terminal.LiveView`, `report.RunReport`, `page.write_report` and `view.load_view`.
"""

from etude.dashboard.page import write_report
from etude.dashboard.terminal import LiveView, final_table
from etude.dashboard.text import duration

PUBLIC = ("", "report", "view")
