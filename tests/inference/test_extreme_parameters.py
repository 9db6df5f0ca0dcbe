"""Extreme values of every numeric parameter, at every route: an answer, or a refusal that names the parameter."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

MESSAGES = [{"role": "user", "content": "x"}]
COMMON = ("temperature", "top_p", "max_tokens", "seed")
MORE = (
    *COMMON, "n", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
    "stop_token_ids", "allowed_token_ids", "min_tokens", "best_of", "length_penalty", "truncate_prompt_tokens",
)  # fmt: skip
ROUTES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "/v1/completions": (
        {"prompt": "x", "max_tokens": 2},
        (*MORE, "logprobs", "prompt_logprobs"),
    ),
    "/v1/chat/completions": (
        {"messages": MESSAGES, "max_tokens": 2, "logprobs": True},
        (*MORE, "top_logprobs", "max_completion_tokens"),
    ),
    "/v1/messages": (
        {"model": "nano", "messages": MESSAGES, "max_tokens": 2},
        ("temperature", "top_p", "top_k", "max_tokens"),
    ),
    "/v1/responses": (
        {"input": "x", "max_output_tokens": 2},
        ("temperature", "top_p", "max_output_tokens", "top_logprobs", "max_tool_calls"),
    ),
    "/generate": (
        {"ids": [40, 41], "max_tokens": 2},
        (*COMMON, "stop", "routes_from"),
    ),
    "/v1/apply": (
        {"code": "a = 1\n", "update": "a = 2\n"},
        ("temperature", "seed"),
    ),
}
FLOATS = ("1e-300", "1e300", "-0.0", "5e-324", "-5e-324", "1e-38", "3.5e38", "1e-7", "-1e300")
INTEGERS = ("0", "-1", "2147483647", "2147483648", "9223372036854775807", "18446744073709551616", "1" + "0" * 300)
OTHERS = ('"NaN"', '"Infinity"', "NaN", "-Infinity", "1e999", "true", "[]", "{}", '""')
LONG = ("max_tokens", "max_completion_tokens", "max_output_tokens")  # an accepted one is an answer of the whole context


def body_of(base: dict[str, Any], name: str, value: str) -> str:
    if name == "logit_bias":
        value = f'{{"50": {value}, "{value.strip(chr(34))}": 1}}' if value[0] not in "[{" else value
    if name in ("stop_token_ids", "allowed_token_ids", "stop"):
        value = f"[{value}]"
    fields = {key: json.dumps(part) for key, part in base.items() if key != name} | {name: value}
    if name in LONG:
        fields |= {"stop": "[5]"} if "ids" in base else {}
    return "{" + ", ".join(f'"{key}": {part}' for key, part in fields.items()) + "}"


def check(client: httpx2.Client, route: str, name: str, value: str) -> None:
    base, _ = ROUTES[route]
    body = body_of(base, name, value)
    answer = client.post(route, content=body, headers={"content-type": "application/json"})
    if answer.status_code != 200:
        if route == "/v1/apply" and answer.status_code == 422:  # the model is no apply model
            return
        assert answer.status_code == 400, (route, body[:300], answer.text)
        told = answer.json()["error"]["message"]
        named = "tokens" if name in ("max_output_tokens", "max_tokens") else name
        assert named in told or "JSON" in told or "Number" in told, (body[:300], told)
        assert len(told) < 600


@pytest.mark.parametrize("route", ROUTES)
def test_the_most_extreme_values(nano_http: httpx2.Client, route: str) -> None:
    for name in ROUTES[route][1]:
        for value in ("1e-300", "1e300", "18446744073709551616", '"NaN"'):
            if route != "/v1/apply" or value != "1e-300":  # it takes seconds
                check(nano_http, route, name, value)


@pytest.mark.slow
@pytest.mark.parametrize("route", ROUTES)
def test_every_extreme_value(nano_http: httpx2.Client, route: str) -> None:
    for name in ROUTES[route][1]:
        for value in (*FLOATS, *INTEGERS, *OTHERS):
            if not (name in LONG and value == "2147483647"):
                check(nano_http, route, name, value)


def test_parameters_that_exclude_every_token(nano_http: httpx2.Client) -> None:
    """The request's own fault, whole and in a stream, on both APIs' shapes."""
    own = {"allowed_token_ids": [50], "bad_words": ["x"]}
    answer = nano_http.post("/v1/completions", json={"prompt": "x", "max_tokens": 3, **own})
    word = nano_http.post("/tokenize", json={"prompt": "x", "add_special_tokens": False}).json()["tokens"]
    assert answer.status_code == 200
    own["allowed_token_ids"] = word[:1]
    for route, base in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": MESSAGES})):
        answer = nano_http.post(route, json={**base, "max_tokens": 3, **own})
        assert answer.status_code == 400, answer.text
        assert "exclude every token" in answer.json()["error"]["message"]
        assert answer.json()["error"]["type"] == "invalid_request_error"
        streamed = nano_http.post(route, json={**base, "max_tokens": 3, "stream": True, **own})
        assert "exclude every token" in streamed.text


@pytest.mark.parametrize(("value", "status"), [(0.0099, 400), (0.01, 200), (100, 200), (100.1, 400), (0, 400)])
def test_bounds_of_the_repetition_penalty(nano_http: httpx2.Client, value: float, status: int) -> None:
    body = {"prompt": "def f(x):\n", "max_tokens": 8, "repetition_penalty": value, "temperature": 1e-3}
    answer = nano_http.post("/v1/completions", json=body)
    assert answer.status_code == status, answer.text
    if status == 400:
        assert "repetition_penalty must lie in [0.01, 100]" in answer.json()["error"]["message"]
