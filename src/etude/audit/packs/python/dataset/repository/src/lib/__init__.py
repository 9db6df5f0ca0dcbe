from .core import chunk, label
