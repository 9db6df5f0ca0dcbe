"""Rows of rollouts to fine-tune on: gold answers played with the tools (`scripted`), and a model's rollouts that agree
(`agreed`). Both keep what is done in OUTPUT.partial (`partial`)."""

from etude.run.traces.agreed import RolloutPlayer, RolloutSources, write_agreed_rollouts
from etude.run.traces.scripted import write_traces
