"""How the `apply` tool lays a sketch into a file: the deterministic merge, or an apply model behind a server.

An agent that writes a sketch (the lines that change, a neighbour or two, a marker for the rest) need not quote what it
replaces. A server is any that answers `POST /v1/apply` as `etude serve` does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import httpx2

from etude.edits.edit import Edit
from etude.errors import UserError
from etude.renderers.text import ToolError
from etude.sandbox.base import ApplyFailed

Apply = Callable[[Edit], Awaitable[str]]
"""The new text of the edit's file. Raises ToolError for what the agent can mend, BoxError for what it can't."""

_SECONDS = 120.0
_TIMEOUT = httpx2.Timeout(_SECONDS, connect=5.0)
_ATTEMPTS = 3


async def merged(edit: Edit) -> str:
    """Without a model."""
    try:
        return await asyncio.to_thread(edit.merged)
    except UserError as e:
        raise ToolError(str(e)) from None


def by_server(url: str) -> Apply:
    """The answer of an apply model. A sketch that names no place is refused before the model is asked."""

    async def apply(edit: Edit) -> str:
        await merged(edit)
        body = {"code": edit.text, "update": edit.sketch, "instruction": edit.instruction}
        failed = ""
        async with httpx2.AsyncClient(timeout=_TIMEOUT, trust_env=False) as http:
            for attempt in range(_ATTEMPTS):
                await asyncio.sleep(0.2 * attempt)
                try:
                    answer = await http.post(f"{url.rstrip('/')}/v1/apply", json=body)
                except httpx2.HTTPError as e:
                    failed = type(e).__name__
                    continue
                if answer.status_code < 300:
                    return answer.json()["code"]
                if answer.status_code < 500:
                    raise ToolError(f"the edit was not applied ({_message(answer)}); use edit instead")
                failed = f"status {answer.status_code}"
        raise ApplyFailed(f"the apply server at {url} did not answer ({failed})")

    return apply


def _message(answer: httpx2.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])[:200]
    except (ValueError, KeyError, TypeError):
        return f"status {answer.status_code}"
