"""Modal: a sandbox for each box, by the service's Python package (the extra `modal`)."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

from etude.code import extras
from etude.errors import UserError
from etude.sandbox.backends.host import LIFETIME, Need, ProgramStream
from etude.sandbox.base import Capabilities, LaunchFailed

APP = "etude-boxes"
CHUNK = 1 << 20


class ModalMachine(ProgramStream):
    """One process in one sandbox."""

    def __init__(self, modal: Any, sandbox: Any, process: Any) -> None:
        self._modal, self._sandbox, self._process = modal, sandbox, process
        self._output: AsyncIterator[bytes] = aiter(process.stdout)

    async def read(self) -> bytes:
        """As `ProgramStream.read`."""
        try:
            return await anext(self._output, b"")
        except self._modal.exception.Error as e:
            raise OSError(str(e)) from None

    async def write(self, data: bytes) -> None:
        """As `ProgramStream.write`."""
        try:
            for start in range(0, len(data), CHUNK):
                self._process.stdin.write(data[start : start + CHUNK])
                await self._process.stdin.drain.aio()
        except (self._modal.exception.Error, ValueError) as e:
            raise OSError(str(e)) from None

    async def _close(self) -> None:
        with contextlib.suppress(self._modal.exception.Error):  # the service ends it when its time is over
            await self._sandbox.terminate.aio()


class Modal:
    """`image` is the name of one in a registry."""

    name = "modal"

    def __init__(self, image: str) -> None:
        self._image = image
        self._modal: Any = None
        self._app: Any = None

    async def reach(self) -> None:
        """Raises UserError if the package is missing or the service does not answer."""
        try:
            import modal  # type: ignore[import-not-found]
        except ModuleNotFoundError:
            raise UserError(extras.lacks("Modal", "modal") or "Modal needs the package modal") from None
        self._modal = service = cast(Any, modal)
        try:
            self._app = await service.App.lookup.aio(APP, create_if_missing=True)
        except service.exception.Error as e:
            raise UserError(f"modal does not answer ({e}); run `modal setup`, or set MODAL_TOKEN_ID.") from None

    async def open(self) -> Capabilities:
        """What the boxes of the service have. Raises UserError."""
        await self.reach()
        return Capabilities("gvisor", True, False, True, True, "none", limits=("memory", "processes", "cpus"))

    async def start(self, command: Sequence[str], need: Need) -> ModalMachine:
        """Start a sandbox of the service and its program. Raises LaunchFailed."""
        modal, sandbox = self._modal, None
        try:
            sandbox = await modal.Sandbox.create.aio(
                app=self._app,
                image=modal.Image.from_registry(self._image),
                timeout=int(LIFETIME),
                cpu=(0.125, need.limits.cpus),
                memory=(128, need.memory_mb),
                block_network=True,
                workdir="/",
            )
            process = await sandbox.exec.aio(*command, text=False, stderr=modal.stream_type.StreamType.DEVNULL)
        except modal.exception.Error as e:
            if sandbox is not None:
                await ModalMachine(modal, sandbox, None).close()
            raise LaunchFailed(f"modal made no sandbox ({e})") from None
        return ModalMachine(modal, sandbox, process)
