"""The token of a vLLM server: it covers the routes that vLLM's own key leaves open."""

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from etude.errors import UserError
from etude.inference.vllm.guard import TokenGuard
from etude.protocol import TOKEN_VARIABLE, bearer

PATHS = ("/collective_rpc", "/pause", "/update_weight_version", "/server_info", "/metrics", "/health")


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> TestClient:
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    routes = [Route(path, lambda _: PlainTextResponse("open"), methods=["GET", "POST"]) for path in PATHS]
    app = Starlette(routes=routes)
    app.add_middleware(TokenGuard)  # as vLLM adds it
    return TestClient(app)


@pytest.mark.parametrize("path", [*PATHS, "/nothing", "//health", "/health/"])
def test_all_routes_but_health_need_the_token(client: TestClient, path: str) -> None:
    for method in ("GET", "POST", "OPTIONS"):
        for wrong in ({}, bearer("other"), {"authorization": "Basic secret"}):
            assert (client.request(method, path, headers=wrong).status_code == 401) == (path != "/health")
    assert client.post(path, headers=bearer("secret")).status_code in (200, 404)


def test_a_server_without_a_token_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(UserError, match=TOKEN_VARIABLE):
        TokenGuard(Starlette())
