"""Which backend makes boxes, by its name in [sandbox]."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial

from etude.config import SandboxConfig, validate_sandbox
from etude.errors import UserError
from etude.sandbox.backends.host import Carrier
from etude.sandbox.backends.remote import open_carried
from etude.sandbox.namespace.sandbox import Backend, open_sandbox


def carrier_of(config: SandboxConfig) -> Carrier | None:
    """What makes machines for boxes; None: this machine's own kernel does. Raises UserError."""
    match config.type:
        case "namespace":
            return None
        case "docker" | "podman":
            from etude.sandbox.backends.containers import Containers

            return Containers(config.type, config.image, config.runtime)
        case "kubernetes":
            from etude.sandbox.backends.kubernetes import Pods

            return Pods(config.image, config.runtime, config.namespace)
        case "modal":
            from etude.sandbox.backends.modal import Modal

            return Modal(config.image)
        case "e2b":
            from etude.sandbox.backends.e2b import E2B

            return E2B(config.image)


async def reachable() -> dict[str, str]:
    """Every backend but the namespaces -> why it cannot be used here; empty if it can."""
    found: dict[str, str] = {}
    for name in ("docker", "podman", "kubernetes", "modal", "e2b"):
        carrier = carrier_of(validate_sandbox({"type": name, "image": "none"}, name))
        assert carrier is not None
        try:
            await carrier.reach()
            found[name] = ""
        except UserError as e:
            found[name] = str(e)
    return found


def opened(config: SandboxConfig) -> Callable[..., AbstractAsyncContextManager[Backend]]:
    """`namespace.open_sandbox`, or the same of another backend."""
    carrier = carrier_of(config)
    if carrier is None or config.type == "namespace":
        return open_sandbox
    return partial(open_carried, carrier, without=config.without)
