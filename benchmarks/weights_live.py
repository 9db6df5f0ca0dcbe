"""What a swap costs those who are served, and how long a version takes to reach four clusters.

pause-ms                a client streams tokens from a real server on models/nano while versions arrive: the median, over
                        the swaps, of the longest gap between two tokens around a swap, less the median gap; a swap's
                        gaps are those within a tenth of a second of the version's first token
four-clusters/seconds   one publisher, four clusters; each a relay behind an emulated link and a server's receiver. From
                        the publisher's first byte to the last commit; median over the versions
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import torch

from etude import processes
from etude.models.loading import load_model, named_tensors
from etude.store import Store, open_store
from etude.weights.publisher import Publisher
from etude.weights.receiver import Receiver
from etude.weights.source import Source
