"""A model behind OpenAI's and Anthropic's API that solves the tasks of a dataset: its answers are written beforehand.

It is as strict as the real ones: every call needs its result, in order, and its tools' definitions must be there.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from etude.records import CodeTask

KEY = "sk-secret"
Call = tuple[str, dict[str, Any]]


class FakeModel:
    """Edits the file of the task in its first turn, tests in its second, and finishes in its third. `busy` are statuses
    that the first requests get. Where `fails` is in the instruction, the edit is left out."""

    def __init__(self, tasks: Sequence[CodeTask], *, busy: Sequence[int] = (), fails: str = "\0") -> None:
        self.tasks = tasks
        self.busy = list(busy)
        self.fails = fails
        self.requests: list[dict[str, Any]] = []
        self.statuses = Counter[int]()
        self._numbers = itertools.count()

    def app(self) -> Starlette:
        """Both APIs."""
        return Starlette(routes=[
            Route("/v1/chat/completions", self.openai, methods=["POST"]),
            Route("/v1/messages", self.anthropic, methods=["POST"]),
        ])  # fmt: skip

    def turn(self, user: str, number: int) -> list[Call]:
        """The calls of a turn."""
        if self.fails in user:
            return [("finish", {})]
        task = next(task for task in self.tasks if task.prompt in user)
        (path,) = task.changes
        change = {"path": path, "old": task.changes[path], "new": task.solution[path]}
        return [[("list", {}), ("edit", change)], [("test", {})], [("finish", {})]][number]

    async def openai(self, request: Request) -> JSONResponse:
        """Chat completions."""
        body = await request.json()
        if (refused := self._refused(request.headers.get("authorization") == f"Bearer {KEY}")) is not None:
            return refused
        self.requests.append(body)
        asked: list[str] = []
        for message in body["messages"]:
            if message["role"] == "tool":
                if not asked or asked.pop(0) != message["tool_call_id"]:
                    return self._bad("a result without its call")
            elif asked:
                return self._bad("a call without its result")
            asked += [call["id"] for call in message.get("tool_calls") or ()]
        if asked or body["messages"][0]["role"] != "system" or len(body["tools"]) < 15:
            return self._bad("results, the system message or tools are missing")
        user = body["messages"][1]["content"]
        number = sum(message["role"] == "assistant" for message in body["messages"])
        calls = [
            {"id": f"call-{next(self._numbers)}", "type": "function",
             "function": {"name": name, "arguments": json.dumps(arguments)}}
            for name, arguments in self.turn(user, number)
        ]  # fmt: skip
        message = {"role": "assistant", "content": None, "tool_calls": calls}
        usage = {
            "prompt_tokens": 100 * (number + 1),
            "completion_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 40},
        }
        return JSONResponse({"choices": [{"message": message, "finish_reason": "tool_calls"}], "usage": usage})

    async def anthropic(self, request: Request) -> JSONResponse:
        """Messages."""
        body = await request.json()
        own = request.headers.get("x-api-key") == KEY and "anthropic-version" in request.headers
        if (refused := self._refused(own)) is not None:
            return refused
        self.requests.append(body)
        roles = [message["role"] for message in body["messages"]]
        if (
            roles != ["user", "assistant"] * (len(roles) // 2) + ["user"]
            or not body["system"]
            or not body["max_tokens"]
        ):
            return self._bad("roles must alternate")
        for before, after in itertools.pairwise(body["messages"]):
            if before["role"] == "assistant":
                uses = [block["id"] for block in before["content"] if block["type"] == "tool_use"]
                if uses != [block["tool_use_id"] for block in after["content"]]:
                    return self._bad("a call without its result")
        if any(set(tool) != {"name", "description", "input_schema"} for tool in body["tools"]):
            return self._bad("not a tool")
        calls = self.turn(body["messages"][0]["content"], len(roles) // 2)
        blocks = [{"type": "text", "text": "I see."}] + [
            {"type": "tool_use", "id": f"toolu_{next(self._numbers)}", "name": name, "input": arguments}
            for name, arguments in calls
        ]
        usage = {"input_tokens": 60 * (len(roles) // 2 + 1), "cache_read_input_tokens": 40, "output_tokens": 7}
        return JSONResponse({"content": blocks, "stop_reason": "tool_use", "usage": usage})

    def _refused(self, allowed: bool) -> JSONResponse | None:
        if not allowed:
            self.statuses[401] += 1
            return JSONResponse({"error": {"message": "no such key"}}, 401)
        if self.busy:
            status = self.busy.pop(0)
            self.statuses[status] += 1
            return JSONResponse({"error": {"message": "slow down"}}, status, headers={"retry-after-ms": "1"})
        self.statuses[200] += 1
        return None

    def _bad(self, why: str) -> JSONResponse:
        self.statuses[400] += 1
        return JSONResponse({"error": {"message": why}}, 400)
