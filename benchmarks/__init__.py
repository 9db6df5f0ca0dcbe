"""Measurements behind `etude bench`, side by side against the strongest baseline."""
