"""Scripted attacks on boxes and graders, and the required result of each: `etude doctor sandbox` runs them all."""
