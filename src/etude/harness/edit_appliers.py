"""Appliers of lazy edit snippets for the tool `apply`: the deterministic merge, or an apply model of a server.

An agent that writes a snippet (the lines that change, a neighbour or two, a marker for the rest) need not quote the
replaced lines. A server is any that answers `POST /v1/apply` as `etude serve` does.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import httpx2

from etude.edits import Edit
from etude.errors import UserError
from etude.protocol import bearer, own_token
from etude.renderers import ToolError
from etude.sandbox import ApplyFailed

EditApplier = Callable[[Edit], Awaitable[str]]
"""Returns the new text of the edit's file. Raises ToolError where the agent can help, else BoxError."""

_TIMEOUT = httpx2.Timeout(120.0, connect=5.0)  # seconds
_ATTEMPTS = 3
T = TypeVar("T")


async def merge_applier(edit: Edit) -> str:
    """The deterministic merge. Raises ToolError for a snippet that names no place in the file, or more than one."""
    return await _tried(edit.merged)


async def _tried(merge: Callable[[], T]) -> T:
    try:
        return await asyncio.to_thread(merge)
    except UserError as e:
        raise ToolError(str(e)) from None


def server_applier(url: str) -> EditApplier:
    """The applier that uses the apply model at `url`; a snippet that names no place is refused before the request. The
    applier raises ToolError if the server refuses the edit, ApplyFailed if it does not answer."""

    async def apply(edit: Edit) -> str:
        await _tried(edit.draft)
        body = {"code": edit.text, "update": edit.sketch, "instruction": edit.instruction}
        failed = ""
        async with httpx2.AsyncClient(timeout=_TIMEOUT, trust_env=False, headers=bearer(own_token())) as http:
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
