"""Scripted attacks on boxes and graders, and what each must come to: `etude doctor sandbox` runs them all."""
