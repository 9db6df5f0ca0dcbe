"""Random models are made by tests/models/tiny.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "models"))
