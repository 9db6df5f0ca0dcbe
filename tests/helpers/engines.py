"""An engine behind HTTP within the tests' process: a process of its own takes seconds to load torch anew."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from etude.config import EngineConfig
from etude.inference.engine.engine import Engine
from etude.inference.engine.loading import load_engine
from etude.inference.server.draining import Drain
from etude.inference.server.server import build_app
from etude.inference.server.weights import WeightWatcher
from tests.helpers.http_apps import guarded

CONFIG = EngineConfig(cache_mb=64, speculate=False)


@contextmanager
def served(folder: Path, config: EngineConfig = CONFIG, names: tuple[str, ...] = ()) -> Iterator[str]:
    """The URL of a server of the model in `folder`, under these names or the folder's."""
    with serving(load_engine(folder, config), folder, names) as url:
        yield url


@contextmanager
def serving(engine: Engine, folder: Path, names: tuple[str, ...] = (), drain: Drain | None = None) -> Iterator[str]:
    """As `served`, of an engine that was loaded from `folder`."""
    engine.start()
    with guarded(build_app(engine, WeightWatcher(engine, None), folder, names, drain)) as port:
        yield f"http://127.0.0.1:{port}"
    assert engine.failure is None
    engine.close()
