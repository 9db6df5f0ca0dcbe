"""Which backend makes boxes, by its name in [sandbox]."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from etude.config import SandboxConfig, validate_sandbox
from etude.errors import UserError
from etude.sandbox.backend import Backend, BackendOptions
from etude.sandbox.backends.host import RemoteHost
from etude.sandbox.backends.remote import open_remote
from etude.sandbox.namespace.backend import open_namespace


def remote_host(config: SandboxConfig) -> RemoteHost | None:
    """The host that makes machines for boxes; None for the kernel of this machine. Raises UserError."""
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
    reasons: dict[str, str] = {}
    for name in ("docker", "podman", "kubernetes", "modal", "e2b"):
        host = remote_host(validate_sandbox({"type": name, "image": "none"}, name))
        assert host is not None
        try:
            await host.reach()
            reasons[name] = ""
        except UserError as e:
            reasons[name] = str(e)
    return reasons


def open_backend(config: SandboxConfig, options: BackendOptions) -> AbstractAsyncContextManager[Backend]:
    """Open the configured backend. Raises UserError for what is missing here, or what the backend cannot give."""
    if config.type == "namespace":
        return open_namespace(options)
    host = remote_host(config)
    assert host is not None
    return open_remote(host, options, config.without)
