"""Files for schedulers, from the same description as the placers: scripts for sbatch, and objects of KubeRay.

They start clusters of Ray, and the run in them; a fleet without Ray is a job of one machine. A pod of Kubernetes is a
node of Ray for one engine, player or group of ranks. Under SLURM a whole machine is one, with room for several: two
nodes of Ray do not start at one address. Objects of Kubernetes are JSON, which kubectl reads as it does YAML.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from etude.config import FleetConfig, RLConfig
from etude.errors import UserError

PORT = 6379  # of the head
RAY_VERSION = "2.60.0"  # of the images, for KubeRay, which asks no older one for tokens
CONTROLLER_CPUS = 4  # of the run itself, which may play episodes, and the head
LEAVE_SECONDS = 60  # of a pod, in which engines hand back their turns
_DRAIN = "from etude.fleet.keeper import drain_host; drain_host()"
_GPU = "nvidia.com/gpu"
_CONFIGURATION, _WORK = "/etude/configuration", "/etude/work"


@dataclass(frozen=True)
class _Nodes:
    """Nodes of one size."""

    name: str
    count: int
    cpus: int
    gpus: int


@dataclass(frozen=True)
class Machine:
    """The size of a machine of the scheduler."""

    cpus: int = 64
    gpus: int = 8


def _nodes(fleet: FleetConfig, config: RLConfig, placer: str, machine: Machine) -> list[_Nodes]:
    """The nodes that the tables of a placer need: of one engine, or player, or of the ranks of a machine."""
    nodes = [_Nodes(t.name, t.count, math.ceil(t.cpus), t.gpus) for t in fleet.engines if t.placer == placer]
    if (players := fleet.players) is not None and players.placer == placer:
        nodes.append(_Nodes("players", players.count, math.ceil(players.cpus), 0))
    if (trainer := fleet.trainer) is not None and trainer.placer == placer:
        nodes.append(_trainer(config, trainer.cpus, machine))
    return nodes


def _trainer(config: RLConfig, cpus: float, machine: Machine) -> _Nodes:
    """The nodes of the trainer's ranks."""
    ranks = config.trainer.mesh.ranks
    together = min(ranks, machine.gpus)
    gpus = 0 if config.trainer.device == "cpu" else together
    return _Nodes("trainer", math.ceil(ranks / together), math.ceil(cpus * together), gpus)


def _label(name: str) -> str:
    """The name of a run as a label of Kubernetes."""
    return re.sub(r"[^a-z0-9-]+", "-", name.lower()).strip("-")[:40]


def _shared(nodes: _Nodes, machine: Machine) -> _Nodes:
    """Machines with room for several of `nodes`."""
    room = machine.gpus // nodes.gpus if nodes.gpus else machine.cpus // nodes.cpus
    together = min(nodes.count, room)
    if together == 0:
        own = f"{machine.cpus} and {machine.gpus}"
        raise UserError(f"{nodes.name} needs {nodes.cpus} CPUs and {nodes.gpus} GPUs, and a machine has {own}")
    return _Nodes(nodes.name, math.ceil(nodes.count / together), nodes.cpus * together, nodes.gpus * together)


def slurm_files(
    fleet: FleetConfig, config: RLConfig, paths: tuple[str, str], machine: Machine = Machine()
) -> dict[str, str]:
    """Scripts for sbatch, by file name. `paths`: those of the configurations of run and fleet where the scripts run.
    Raises UserError for clusters of Ray that are there already, and for what no machine has room for."""
    run, words = f"outputs/{config.name}", shlex.join(["etude", "train", paths[0], "--fleet", paths[1]])
    train = f"""if [ -d {shlex.quote(run)} ]; then
    etude train --resume {shlex.quote(run)} &
else
    {words} &
fi
train=$!
trap 'kill -TERM $train' TERM
wait $train || wait $train
"""
    if wrong := [address for address in fleet.addresses if address != "auto"]:
        raise UserError(f'the job has a head of its own: set address = "auto" in place of "{wrong[0]}"')
    local = _nodes(fleet, config, "local", machine)
    own = [] if fleet.trainer else [_trainer(config, config.trainer.threads, machine)]
    controller = _Nodes("controller", 1, CONTROLLER_CPUS, 0)
    if fleet.addresses:
        nodes = [_shared(nodes, machine) for nodes in _nodes(fleet, config, "ray", machine)]
        return {"ray.sbatch": _ray_script(config, [_one_node("ray", [controller, *own, *local]), *nodes], train)}
    files = {"run.sbatch": _script(config, [_one_node("run", [controller, *own, *local])], train)}
    if added := [nodes for nodes in local if nodes.name != "trainer"]:
        up = f"exec {shlex.join(['etude', 'fleet', 'up', paths[1], run])}\n"
        files["up.sbatch"] = _script(config, [_one_node("up", added)], up)
    return files


def _one_node(name: str, parts: list[_Nodes]) -> _Nodes:
    """One node with room for all of `parts`."""
    return _Nodes(name, 1, sum(n.count * n.cpus for n in parts), sum(n.count * n.gpus for n in parts))


def _script(config: RLConfig, parts: list[_Nodes], body: str) -> str:
    """A script for sbatch; several parts are one heterogeneous job."""
    lines = ["#!/bin/bash"]
    for number, part in enumerate(parts):
        lines += ["#SBATCH hetjob"] if number else []
        lines += [f"#SBATCH --nodes={part.count}", "#SBATCH --ntasks-per-node=1", "#SBATCH --exclusive"]
        lines += [f"#SBATCH --cpus-per-task={part.cpus}"]
        lines += [f"#SBATCH --gpus-per-node={part.gpus}"] if part.gpus else []
        if number == 0:
            lines += [
                f"#SBATCH --job-name={_label(config.name)}-{part.name}",
                f"#SBATCH --output={_label(config.name)}-{part.name}-%j.log",
                "#SBATCH --open-mode=append",
                "#SBATCH --requeue",
                "#SBATCH --signal=B:TERM@60",
            ]
    return "\n".join([*lines, "set -u", 'cd "$SLURM_SUBMIT_DIR"', "", body])


def _ray_script(config: RLConfig, nodes: list[_Nodes], train: str) -> str:
    """A heterogeneous job: the head with the run, then the nodes of each table. Nodes come back when the head or their
    process has ended; what runs on them goes on meanwhile."""
    ports = "--min-worker-port 0 --max-worker-port 0 --dashboard-agent-listen-port 0 --disable-usage-stats"
    lines = [
        "export RAY_AUTH_MODE=token",
        "export RAY_AUTH_TOKEN=\"${RAY_AUTH_TOKEN:-$(python -c 'import secrets; print(secrets.token_hex(32))')}\"",
        f'head="$(hostname -I | cut -d " " -f 1):{PORT}"',
        'export RAY_ADDRESS="$head"',  # address = "auto" of the fleet
        "while true; do",
        f"    ray start --head --block --port {PORT} --num-cpus 0 --num-gpus 0 --include-dashboard false {ports}",
        "    sleep 5",
        "done &",
    ]
    for number, part in enumerate(nodes[1:], 1):
        start = f"ray start --block --address $head --num-cpus {part.cpus} --num-gpus {part.gpus} {ports}"
        lines.append(f"head=\"$head\" srun --het-group={number} bash -c 'while true; do {start}; sleep 5; done' &")
    return _script(config, nodes, "\n".join([*lines, "", train]))


def kuberay_files(
    fleet: FleetConfig,
    config: RLConfig,
    texts: Mapping[str, str],
    *,
    image: str,
    claim: str,
    machine: Machine = Machine(),
) -> dict[str, str]:
    """A RayJob and the ConfigMap with its configurations `texts` (run.toml, fleet.toml), by file name. The run folder
    is on the volume `claim`. Raises UserError for tables that no cluster of Ray has."""
    if wrong := _nodes(fleet, config, "local", machine):
        raise UserError(f'KubeRay starts what Ray places, and {wrong[0].name} has placer = "local": set "ray"')
    if wrong := [address for address in fleet.addresses if address != "auto"]:
        raise UserError(f'a RayJob has a head of its own: set address = "auto" in place of "{wrong[0]}"')
    if not fleet.addresses:
        raise UserError('the fleet places nothing in Ray: set placer = "ray" in a table')
    name, folder = f"etude-{_label(config.name)}", f"outputs/{config.name}"
    words = shlex.join(["etude", "train", f"{_CONFIGURATION}/run.toml", "--fleet", f"{_CONFIGURATION}/fleet.toml"])
    resume = f"etude train --resume {shlex.quote(folder)}"
    entry = f"cd {_WORK} && if [ -d {shlex.quote(folder)} ]; then {resume}; else {words}; fi"

    def template(kind: str, cpus: int, gpus: int) -> dict[str, Any]:
        share = {"cpu": str(cpus), **({_GPU: str(gpus)} if gpus else {})}
        mounts = {"work": _WORK, "configuration": _CONFIGURATION}
        container = {
            "name": kind,
            "image": image,
            "workingDir": _WORK,
            "envFrom": [{"secretRef": {"name": name, "optional": True}}],
            "lifecycle": {"preStop": {"exec": {"command": ["python", "-c", _DRAIN]}}},
            "resources": {"limits": share, "requests": share},
            "volumeMounts": [{"name": volume, "mountPath": path} for volume, path in mounts.items()],
        }
        work = {"name": "work", "persistentVolumeClaim": {"claimName": claim}}
        configuration = {"name": "configuration", "configMap": {"name": name}}
        volumes = [work, configuration]
        return {"spec": {"containers": [container], "volumes": volumes, "terminationGracePeriodSeconds": LEAVE_SECONDS}}

    groups = [
        {
            "groupName": nodes.name,
            "replicas": nodes.count,
            "minReplicas": nodes.count,
            "maxReplicas": nodes.count,
            "rayStartParams": {"num-cpus": str(nodes.cpus)},
            "template": template("ray-worker", nodes.cpus, nodes.gpus),
        }
        for nodes in _nodes(fleet, config, "ray", machine)
    ]
    cluster = {
        "rayVersion": RAY_VERSION,
        "authOptions": {"mode": "token"},
        "headGroupSpec": {
            "rayStartParams": {"num-cpus": "0"},
            "template": template("ray-head", CONTROLLER_CPUS, 0),
        },
        "workerGroupSpecs": groups,
    }
    spec = {"entrypoint": f"bash -c {shlex.quote(entry)}", "shutdownAfterJobFinishes": True, "rayClusterSpec": cluster}
    objects = {
        "configuration.json": _object("v1", "ConfigMap", name, {"data": dict(texts)}),
        "rayjob.json": _object("ray.io/v1", "RayJob", name, {"spec": spec}),
    }
    return {path: json.dumps(value, indent=2) + "\n" for path, value in objects.items()}


def _object(version: str, kind: str, name: str, rest: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, **rest}
