"""The choice of a backend by its name in [sandbox]."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from etude.config import SandboxConfig
from etude.errors import UserError
from etude.sandbox.backend import Backend, BackendOptions
from etude.sandbox.backends.containers import ENGINES, Containers
from etude.sandbox.backends.remote import open_remote
from etude.sandbox.egress.policy import check_package_index, parse_allowed_hosts
from etude.sandbox.images.store import find_image
from etude.sandbox.namespace.backend import open_namespace


async def reachable() -> dict[str, str]:
    """Every backend but the namespaces -> why it cannot be used here; empty if it can."""
    reasons: dict[str, str] = {}
    for name in ENGINES:
        try:
            await Containers(name, "none", None).reach()
            reasons[name] = ""
        except UserError as e:
            reasons[name] = str(e)
    return reasons


def open_backend(config: SandboxConfig, options: BackendOptions) -> AbstractAsyncContextManager[Backend]:
    """Open the configured backend. Raises UserError if this machine or the backend lacks a requirement."""
    if config.type == "namespace":
        return open_namespace(find_image(config), options)
    return open_remote(Containers(config.type, config.image, config.runtime), options, config.without)


def check_sandbox(config: SandboxConfig) -> None:
    """Raises UserError for an image that cannot be unpacked, or for wrong hosts or indexes."""
    if config.type == "namespace":
        find_image(config)
        parse_allowed_hosts(config.egress)
        if config.index is not None:
            check_package_index(config.index)
