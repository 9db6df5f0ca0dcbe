"""The owner's side of the processes that test runs are forked from: see `guest/runs.py`."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from etude.sandbox.backend import GRACE_SECONDS, LEARN_SECONDS, ForkRequest, ForkResult, PristineImage
from etude.sandbox.base import LaunchFailed
from etude.sandbox.cgroups import Groups
from etude.sandbox.connection import Connection, encode, limits_of
from etude.sandbox.namespace.zygote import Zygote

_COLD = b'{"cold": true}\n'  # a hot template's output where a change needs a fresh import


class _TemplateConnection:
    """A started template, and the files whose questions it has compiled."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._learned: dict[str, asyncio.Task[Any]] = {}

    async def learn(self, path: str, sources: Mapping[str, str]) -> None:
        """Send the questions of a test file, once."""
        if path not in self._learned:
            request = self.connection.request({"learn": path}, json.dumps(dict(sources)).encode(), LEARN_SECONDS)
            self._learned[path] = asyncio.create_task(request)
        await asyncio.shield(self._learned[path])


class RunTemplates:
    """For each image a hot template, which has imported the library, and a cold one; for questions, without tests."""

    def __init__(self, zygote: Zygote) -> None:
        self._zygote = zygote
        self._templates: dict[tuple[PristineImage, bool, bool], _TemplateConnection] = {}

    async def fork(self, request: ForkRequest, groups: Groups | None) -> ForkResult:
        """One run in a hot template, or, if a change needs a fresh import, in a cold one. Raises BoxDead."""
        payload = encode({"tests": request.tests}, request.changes)
        limits = request.limits
        cpu_seconds = 0.0
        for hot in (True, False):
            template = await self._template(request.image, hot, request.questions is not None)
            for path, sources in (request.questions or {}).items():
                await template.learn(path, sources)
            with nullcontext() if groups is None else groups.lent(limits) as group:
                descriptors = () if group is None else group.descriptors
                head = {"files": list(request.files), "limits": limits_of(limits), "groups": len(descriptors)}
                reply, output = await template.connection.request(
                    head, payload, limits.seconds + GRACE_SECONDS, descriptors
                )
            cpu_seconds += reply["cpu"]
            if output != _COLD:
                break
        return ForkResult(reply["status"], reply["timed_out"], reply["seconds"], output, cpu_seconds, cold=not hot)

    async def test_names(self, image: PristineImage, path: str) -> list[str]:
        """Node ids of the tests in a file, as pytest collects them. Raises BoxDead or LaunchFailed."""
        template = await self._template(image, True, False)
        _, body = await template.connection.request({"learn": path}, b"", LEARN_SECONDS)
        return json.loads(body)

    async def _template(self, image: PristineImage, hot: bool, questions: bool) -> _TemplateConnection:
        place = image, hot, questions
        template = self._templates.get(place)
        if template is None or template.connection.dead is not None:
            hidden = None if questions else image.hidden
            controls = None if hidden is None else image.controls
            target = f"/run/{secrets.token_hex(12)}"
            hello = {
                "live": False,
                "hot": hot,
                "repository": folder_of(image.repository),
                "site": None if image.site is None else folder_of(image.site),
                "mounts": {} if hidden is None else {target: folder_of(hidden)},
                "hidden": None if hidden is None else target,
                "controls": None if controls is None else asdict(controls),
            }
            template = self._templates[place] = _TemplateConnection(self._zygote.handler(hello))
        await template.connection.started()
        return template

    def close(self, reason: str) -> None:
        """End all templates and their runs."""
        for template in self._templates.values():
            template.connection.close(reason)


def folder_of(path: Path) -> str:
    """A folder of the host, without links. Raises LaunchFailed if there is none."""
    if not path.is_dir():
        raise LaunchFailed(f"{path} is not a folder")
    return str(path.resolve())
