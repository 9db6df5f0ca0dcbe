"""Tiny models come from tests/models/tiny.py, a vLLM server from tests/weights/vllm_server.py."""

import sys
from pathlib import Path

for folder in ("models", "weights"):
    sys.path.insert(0, str(Path(__file__).parent.parent / folder))
