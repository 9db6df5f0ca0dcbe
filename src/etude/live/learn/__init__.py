"""Learning from a window of the log: labels, filters, weights and advantages, then a step of the trainer."""

from etude.live.learn.consented import committed_requests, consented_threads
from etude.live.learn.filters import drop_rates, suspicious
from etude.live.learn.train import train_window
from etude.live.learn.window import (
    LiveContents,
    WindowResult,
    cut_window,
    replay_window,
    signal_calibration,
    window_samples,
)
