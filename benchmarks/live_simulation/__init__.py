"""Simulated users: labels, windows and releases of the live loop, with known preferences and planted faults.

A small policy over a few actions stands for the model (`bandit`), accounts with hidden preferences for the users; what
is measured is the loop's own code. `scenarios` names the faults, `judge` compares the loop with and without the stage
that stops each, in memory. `served` takes the users through the gateway's processes.
"""
