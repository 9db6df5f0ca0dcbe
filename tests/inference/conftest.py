"""The bundled model, served within the tests' process."""

from pathlib import Path

import httpx2
import pytest

from tests.helpers.engines import served

NANO = Path(__file__).parents[2] / "models" / "nano"


@pytest.fixture(scope="package")  # a server that idles beside other tests for minutes has not ended at times
def nano_http():
    """A client of a server under two names, "nano" and "other"."""
    with served(NANO, names=("nano", "other")) as url, httpx2.Client(base_url=url, timeout=120) as client:
        yield client
