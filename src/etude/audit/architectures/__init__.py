"""The table of architectures: which models and uses are exact, refused, or silently wrong."""
