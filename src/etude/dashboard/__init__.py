"""The dashboard: the terminal view while a run goes on, and the page and the report that it leaves behind.

The room draws figures and decides nothing. It imports evals, ledger, rollout's figures and the foundations. `terminal`
is the view, `page` writes the page from a `report`, and `view` reads a run folder.
"""

from etude.dashboard.page import write_report
from etude.dashboard.report import (
    CLOCKED,
    CheatingFigures,
    MismatchSummary,
    RunReport,
    RunSetup,
    Utilisation,
    WeightFigures,
    best_version,
    clock_advice,
    held_out_figures,
    silence_advice,
    training_figures,
)
from etude.dashboard.terminal import LiveView, final_table
from etude.dashboard.text import duration
from etude.dashboard.view import ShownEpisode, load_view, show_run

PUBLIC = ("",)
