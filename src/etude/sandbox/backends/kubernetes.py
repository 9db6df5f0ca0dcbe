"""Kubernetes, by kubectl: a pod for each box, in a RuntimeClass if one is named, behind a policy that allows nothing.

A pod's program ends when `kubectl attach` loses its standard input (`stdinOnce`); a deadline ends what is forgotten.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Sequence
from typing import Any, Literal

from etude.errors import UserError
from etude.sandbox.backends.host import CAPABILITIES, LIFETIME, Need
from etude.sandbox.backends.processes import ProcessStream, attached, last, output
from etude.sandbox.base import Capabilities, LaunchFailed

LABELS = {"app.kubernetes.io/name": "etude-box"}
START_SECONDS = 300  # an image may have to be pulled
DENY_ALL = {
    "apiVersion": "networking.k8s.io/v1",
    "kind": "NetworkPolicy",
    "metadata": {"name": "etude-boxes"},
    "spec": {"podSelector": {"matchLabels": LABELS}, "policyTypes": ["Ingress", "Egress"]},
}


class Pods:
    """`runtime` is a RuntimeClass of the cluster."""

    name = "kubernetes"

    def __init__(self, image: str, runtime: str | None, namespace: str) -> None:
        self._image = image
        self._runtime = runtime
        self._kubectl = ["kubectl", "--namespace", namespace]

    async def reach(self) -> None:
        """Raises UserError if kubectl is not installed or may not make pods."""
        if shutil.which("kubectl") is None:
            raise UserError("kubectl is not installed here; install it, or use another sandbox.type.")
        code, printed = await output([*self._kubectl, "auth", "can-i", "create", "pods"])
        if code:
            raise UserError(f"kubectl may not make pods ({last(printed)}); point it at a cluster that allows it.")

    async def open(self) -> Capabilities:
        """Apply the policy that keeps boxes off the network, and say what boxes have. Raises UserError."""
        await self.reach()
        code, printed = await output([*self._kubectl, "apply", "-f", "-"], data=json.dumps(DENY_ALL).encode())
        if code:
            raise UserError(f"the cluster takes no NetworkPolicy ({last(printed)}); boxes would reach its network.")
        return Capabilities(
            isolation=await self._isolation(),
            rootless=False,
            egress=False,
            pty=True,
            seccomp=True,
            cgroup="none",
            limits=("memory", "processes", "disk", "cpus"),
        )

    async def _isolation(self) -> Literal["container", "gvisor", "vm"]:
        if self._runtime is None:
            return "container"
        query = ["get", "runtimeclass", self._runtime, "--output", "jsonpath={.handler}"]
        code, handler = await output([*self._kubectl, *query])
        if code:
            raise UserError(f"the cluster has no RuntimeClass {self._runtime} ({last(handler)}); see sandbox.runtime.")
        return "gvisor" if "runsc" in handler or "gvisor" in handler else "vm" if "kata" in handler else "container"

    async def start(self, command: Sequence[str], need: Need) -> ProcessStream:
        """Make a pod and attach to its program. Raises LaunchFailed."""
        name = f"etude-{secrets.token_hex(8)}"
        end = [*self._kubectl, "delete", "pod", name, "--now", "--wait=false", "--ignore-not-found"]
        pod = json.dumps(self.pod(name, command, need)).encode()
        code, printed = await output([*self._kubectl, "create", "-f", "-"], data=pod)
        if code == 0:
            wait = ["wait", "--for=condition=Ready", f"pod/{name}", f"--timeout={START_SECONDS}s"]
            code, printed = await output([*self._kubectl, *wait], START_SECONDS + 10)
        if code:
            await output(end)
            raise LaunchFailed(f"no pod was made ({last(printed)})")
        return await attached([*self._kubectl, "attach", "--stdin", "--quiet", f"pod/{name}"], end, lasting=True)

    def pod(self, name: str, command: Sequence[str], need: Need) -> dict[str, Any]:
        """The manifest of a box."""
        limits = need.limits
        tree, disk = f"{limits.disk_mb + need.files_mb}Mi", f"{limits.disk_mb * 1024 - 4}Ki"
        mounts = dict.fromkeys(("/workspace", "/site", "/opt/runner", "/run"), tree)
        mounts |= dict.fromkeys(("/home/user", "/tmp", "/var/tmp", "/dev/shm"), disk)
        volumes = {f"v{i}": (at, size) for i, (at, size) in enumerate(mounts.items())}
        container = {
            "name": "box",
            "image": self._image,
            "command": list(command),
            "workingDir": "/",
            "stdin": True,
            "stdinOnce": True,
            "resources": {
                "limits": {"memory": f"{need.memory_mb}Mi", "cpu": str(limits.cpus)},
                "requests": {"memory": f"{need.memory_mb}Mi", "cpu": "100m"},
            },
            "securityContext": {
                "runAsUser": 0,
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"], "add": list(CAPABILITIES)},
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "volumeMounts": [{"name": name, "mountPath": at} for name, (at, _) in volumes.items()],
        }
        spec: dict[str, Any] = {
            "containers": [container],
            "volumes": [
                {"name": name, "emptyDir": {"medium": "Memory", "sizeLimit": size}}
                for name, (_, size) in volumes.items()
            ],
            "hostname": "devbox",
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "dnsPolicy": "None",
            "dnsConfig": {"nameservers": ["127.0.0.1"]},
            "activeDeadlineSeconds": int(LIFETIME),
            "terminationGracePeriodSeconds": 1,
        }
        if self._runtime is not None:
            spec["runtimeClassName"] = self._runtime
        return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": LABELS}, "spec": spec}
