"""Secrets of forty kinds, made anew from a seed, and the places of a request and its feedback in which they may stand.

The kinds of odd number were kept back while the scrubbing was written: `KINDS[1::2]`.
"""

from __future__ import annotations

import base64
import json
import random
import string
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any

_UPPER, _LOWER, _HEX = string.ascii_uppercase, string.ascii_lowercase, "0123456789abcdef"
_WORD = string.ascii_letters + string.digits
_URL = _WORD + "-_"


class _Maker:
    """Random texts of one kind."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def __call__(self, letters: str, count: int) -> str:
        return "".join(self._random.choice(letters) for _ in range(count))


def _segment(value: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")


def _jwt(r: _Maker) -> str:
    claims = {"sub": r(_WORD, 12), "iat": 1_700_000_000, "exp": 1_900_000_000}
    return f"{_segment({'alg': 'HS256', 'typ': 'JWT'})}.{_segment(claims)}.{r(_URL, 43)}"


def _pem(name: str) -> Callable[[_Maker], str]:
    def make(r: _Maker) -> str:
        lines = "\n".join(r(_WORD + "+/", 64) for _ in range(12))
        return f"-----BEGIN {name}-----\n{lines}\n-----END {name}-----"

    return make


KINDS: tuple[tuple[str, Callable[[_Maker], str], str], ...] = (
    # name, the secret, and a line that it stands in; the first twenty are the commonest
    ("aws id", lambda r: "AKIA" + r(_UPPER + "234567", 16), "aws_access_key_id = {}"),
    ("aws secret", lambda r: r(_WORD + "+/", 40), "aws_secret_access_key = {}"),
    ("github", lambda r: "ghp_" + r(_WORD, 36), "git clone https://{}@github.com/acme/app"),
    ("github fine", lambda r: "github_pat_" + r(_WORD, 22) + "_" + r(_WORD, 59), "GH_TOKEN={}"),
    ("gitlab", lambda r: "glpat-" + r(_URL, 20), "glab auth login --token {}"),
    ("slack", lambda r: f"xoxb-{r('123456789', 12)}-{r('123456789', 12)}-{r(_WORD, 24)}", "slack: {}"),
    ("slack hook", lambda r: f"https://hooks.slack.com/services/T{r(_UPPER, 8)}/B{r(_UPPER, 8)}/{r(_WORD, 24)}",
     "curl -d hi {}"),
    ("stripe", lambda r: "sk_live_" + r(_WORD, 24), "stripe.api_key = '{}'"),
    ("openai", lambda r: f"sk-proj-{r(_WORD, 74)}T3BlbkFJ{r(_WORD, 74)}", "OPENAI_API_KEY={}"),
    ("anthropic", lambda r: f"sk-ant-api03-{r(_URL, 93)}AA", "ANTHROPIC_API_KEY={}"),
    ("google", lambda r: "AIza" + r(_URL, 35), "maps?key={}"),
    ("google secret", lambda r: "GOCSPX-" + r(_URL, 28), "client_secret: {}"),
    ("npm", lambda r: "npm_" + r(_WORD, 36), "//registry.npmjs.org/:_authToken={}"),
    ("pypi", lambda r: "pypi-AgEIcHlwaS5vcmc" + r(_URL, 80), "twine upload -p {}"),
    ("hugging face", lambda r: "hf_" + r(_WORD[:52], 34), "login(token='{}')"),
    ("rsa key", _pem("RSA PRIVATE KEY"), "{}"),
    ("jwt", _jwt, "Authorization: Bearer {}"),
    ("postgres", lambda r: r(_WORD, 18), "postgresql://app:{}@db.acme.io:5432/app"),
    ("password", lambda r: r(_WORD, 6) + "!" + r(_WORD, 9), "DB_PASSWORD={}"),
    ("azure storage", lambda r: r(_WORD + "+/", 86) + "==", "AccountName=acme;AccountKey={};EndpointSuffix=x"),
    ("sendgrid", lambda r: f"SG.{r(_URL, 22)}.{r(_URL, 43)}", "sendgrid {}"),
    ("twilio", lambda r: "SK" + r(_HEX, 32), "twilio {}"),
    ("openssh key", _pem("OPENSSH PRIVATE KEY"), "{}"),
    ("telegram", lambda r: f"{r('123456789', 10)}:AA{r(_URL, 33)}", "bot {}"),
    ("discord", lambda r: f"M{r(_WORD, 23)}.{r(_WORD, 6)}.{r(_URL, 27)}", "discord bot {}"),
    ("mailgun", lambda r: "key-" + r(_HEX, 32), "mailgun {}"),
    ("mailchimp", lambda r: r(_HEX, 32) + "-us14", "mailchimp {}"),
    ("shopify", lambda r: "shpat_" + r(_HEX, 32), "shop {}"),
    ("databricks", lambda r: "dapi" + r(_HEX, 32), "databricks {}"),
    ("digitalocean", lambda r: "dop_v1_" + r(_HEX, 64), "doctl {}"),
    ("vault", lambda r: "hvs." + r(_URL, 95), "vault login {}"),
    ("grafana", lambda r: f"glsa_{r(_WORD, 32)}_{r(_HEX, 8)}", "grafana {}"),
    ("linear", lambda r: "lin_api_" + r(_WORD, 40), "linear {}"),
    ("postman", lambda r: f"PMAK-{r(_HEX, 24)}-{r(_HEX, 34)}", "postman {}"),
    ("doppler", lambda r: "dp.pt." + r(_WORD, 43), "doppler {}"),
    ("square", lambda r: "sq0csp-" + r(_URL, 43), "square {}"),
    ("age", lambda r: "AGE-SECRET-KEY-1" + r("QPZRY9X8GF2TVDW0S3JN54KHCE6MUA7L", 58), "age {}"),
    ("atlassian", lambda r: "ATATT3" + r(_URL, 186), "jira {}"),
    ("groq", lambda r: "gsk_" + r(_WORD, 52), "groq {}"),
    ("basic", lambda r: base64.b64encode(f"admin:{r(_WORD, 20)}".encode()).decode(), "Authorization: Basic {}"),
)  # fmt: skip


def secret_of(kind: int, seed: int = 0) -> tuple[str, str]:
    """A secret of a kind by its number, and the line that it stands in."""
    _, make, line = KINDS[kind]
    secret = make(_Maker(1000 * seed + kind))
    return secret, line.format(secret)


def _result(text: str) -> dict[str, Any]:
    called = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
    return {"messages": [
        {"role": "user", "content": "Go on"}, {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c1", "content": text},
    ]}  # fmt: skip


def _call(text: str) -> dict[str, Any]:
    arguments = json.dumps({"command": text})
    called = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": arguments}}
    return {"messages": [{"role": "user", "content": "Go"}, {"role": "assistant", "tool_calls": [called]},
                         {"role": "tool", "tool_call_id": "c1", "content": ""}]}  # fmt: skip


def _said(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


BODIES: Mapping[str, Callable[[str, str], dict[str, Any]]] = {
    # place -> body of a chat request, of a secret and its line
    "prompt": lambda secret, line: _said(f"Fix this:\n{line}\nthanks"),
    "tool result": lambda secret, line: _result(f"$ env\n{line}\n"),
    "call": lambda secret, line: _call(f"echo '{line}'"),
    "escaped json": lambda secret, line: _said("log: " + json.dumps(json.dumps({"line": line, "n": 1}))),
    "json in a result": lambda secret, line: _result(json.dumps({"output": json.dumps({"text": line})})),
    "base64": lambda secret, line: _said(f"It says {_base64(line)} here"),
    "base64 of a file": lambda secret, line: _result(_base64(f"# settings\nuser = app\n{line}\ndebug = 1\n")),
    "url": lambda secret, line: _said(f"GET /callback?x={urllib.parse.quote(line, safe='')}"),
    "system": lambda secret, line: {"messages": [{"role": "system", "content": line}, *_said("Hi")["messages"]]},
    "metadata": lambda secret, line: _said("Hi") | {"metadata": {"note": line}},
    "key of json": lambda secret, line: _said("Hi") | {"metadata": {line: "x"}},
}
HEADERS = ("user-agent", "x-etude-client", "x-etude-user", "x-etude-session", "x-etude-organisation")
FEEDBACK = ("event_id", "comment", "path", "base", "new")
PLACES = (*BODIES, *HEADERS, *FEEDBACK)
"""All places: of the body, of headers, and of signals and suggestions."""


def forms_of(secret: str, line: str) -> list[bytes]:
    """The bytes by which a secret is known on a disk: as it is, in escapes, in base64."""
    whole = _base64(f"# settings\nuser = app\n{line}\ndebug = 1\n")
    texts = [secret, json.dumps(secret)[1:-1], urllib.parse.quote(secret, safe=""), _base64(line), whole]
    return [text.encode() for text in dict.fromkeys(texts)]
