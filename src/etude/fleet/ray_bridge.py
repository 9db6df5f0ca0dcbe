"""The process that talks to Ray for a run. A driver of Ray ends when the head is gone for a minute: the run's process
must not, so this one is the driver, and a successor finds the actors again by their names.

`python -m etude.fleet.ray_bridge DESCRIPTOR ADDRESS NAMESPACE`: requests and answers are JSON lines on the socket with
this descriptor. The first line says that it is ready, or why not.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from typing import Any

from etude.errors import UserError, first_line
from etude.fleet.keeper import DRAIN_SECONDS, digest

_ANSWER_SECONDS, _POLL_SECONDS, _FREE_SECONDS = 10.0, 2.0, 20.0
_OPEN = "import sys; from ray._raylet import GcsClient; GcsClient(address=sys.argv[1]).internal_kv_keys(b'', None, 5)"


def _head(address: str) -> str:
    """HOST:PORT of the head. Raises UserError if nobody answers there, or not to this token, or to anybody."""
    try:
        from ray._private.services import canonicalize_bootstrap_address_or_die
        from ray._raylet import GcsClient  # pyright: ignore[reportAttributeAccessIssue]
    except ImportError as e:
        raise UserError(f"placer = \"ray\" needs ray ({e}): pip install 'etude[ray]'") from None
    try:
        head = canonicalize_bootstrap_address_or_die(address)
        host, _, port = head.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_SECONDS).close()
    except (OSError, ConnectionError) as e:
        where = "on this machine" if address == "auto" else f"at {address}"
        raise UserError(f"no head of Ray answers {where} ({first_line(e)}): start it, or mend address") from None
    try:
        GcsClient(address=head).internal_kv_keys(b"", None, _ANSWER_SECONDS)
    except Exception as e:  # AuthenticationError, and others by version
        if "auth" not in str(e).lower():
            raise
        raise UserError(
            f"the head of Ray at {head} refuses the token: set RAY_AUTH_TOKEN to that of the cluster"
        ) from None
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    words = [sys.executable, "-P", "-c", _OPEN, head]
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "timeout": 3 * _ANSWER_SECONDS}
    if subprocess.run(words, env={**env, "RAY_AUTH_MODE": "disabled"}, check=False, **silent).returncode == 0:
        raise UserError(
            f"the head of Ray at {head} asks for no token, so whoever reaches it can run programs: start the cluster "
            "with RAY_AUTH_MODE=token"
        )
    return head


def _cluster(head: str) -> str | None:
    """The id of the cluster of a head: a successor that knows nothing of it has another; None while nobody answers."""
    from ray._raylet import GcsClient  # pyright: ignore[reportAttributeAccessIssue]

    host, _, port = head.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_POLL_SECONDS).close()
        return GcsClient(address=head).cluster_id.hex()
    except Exception:  # of several classes by version: it does not answer
        return None


class _Driver:
    """This process as a driver of Ray: the actors of a run by their names."""

    def __init__(self, head: str, run: str) -> None:
        import ray

        from etude.fleet.ray_actor import JobActor

        self.ray, self.run, self.kind = ray, run, ray.remote(JobActor)
        self.actors: dict[str, Any] = {}
        self.pending: dict[str, Any] = {}  # by name, the status on its way
        self.group: Any = None  # the placement group of ranks
        self.head, self.cluster = head, _cluster(head)

    def known(self, name: str) -> Any:
        """The actor of a name, perhaps of another driver; None if there is none."""
        if name not in self.actors:
            with contextlib.suppress(ValueError):
                self.actors[name] = self.ray.get_actor(name, namespace=self.run)
        return self.actors.get(name)

    def start(self, order: dict[str, Any], host: str) -> dict[str, Any]:
        """Makes the actor of a job, or finds it: on the node `host` if it has room, since a keeper may be there."""
        name, job = order["job"]["name"], order["job"]
        if (actor := self.known(name)) is not None:
            with contextlib.suppress(self.ray.exceptions.RayError):
                if self.ray.get(actor.digest.remote(), timeout=_ANSWER_SECONDS) == digest(job):
                    return {"adopted": True}
            self.stop(name, DRAIN_SECONDS)
        options: dict[str, Any] = {}
        if (node := self.node_at(host)) is not None:
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=True)
        self.actors[name] = self.kind.options(
            name=name,
            namespace=self.run,
            lifetime="detached",
            max_restarts=-1,
            max_concurrency=4,
            num_cpus=job["cpus"],
            num_gpus=job["gpus"],
            **options,
        ).remote(json.dumps(order))
        return {"adopted": False}

    def node_at(self, host: str) -> str | None:
        """The id of the living node at an address."""
        nodes = self.ray.nodes() if host else []
        return next((n["NodeID"] for n in nodes if n["Alive"] and n["NodeManagerAddress"] == host), None)

    def start_group(self, order: dict[str, Any], count: int, seconds: float) -> dict[str, Any]:
        """Places ranks together, then starts them. They end with this process. Raises UserError without room."""
        from ray.util.placement_group import placement_group, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        job = order["job"]
        share = {"CPU": job["cpus"], **({"GPU": job["gpus"]} if job["gpus"] else {})}
        self.group = placement_group([share] * count, strategy="PACK")
        if not self.group.wait(seconds):
            remove_placement_group(self.group)
            needs = " and ".join(f"{n:g} {kind}" for kind, n in share.items())
            raise UserError(f"Ray had no room for {count} ranks of {needs} each within {seconds:.0f} seconds")
        names = [f"{job['name']}-{rank}" for rank in range(count)]
        for rank, name in enumerate(names):
            own = {**order, "job": {**job, "name": name}}
            place = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=rank)
            self.actors[name] = self.kind.options(
                max_restarts=0, max_concurrency=4, num_cpus=job["cpus"], num_gpus=job["gpus"], scheduling_strategy=place
            ).remote(json.dumps(own))
        refs = [self.actors[name].place.remote() for name in names]
        places = [json.loads(text) for text in self.ray.get(refs, timeout=seconds)]
        alone = len({place["host"] for place in places}) == 1
        env = {
            "WORLD_SIZE": str(count),
            "LOCAL_RANK": "0",  # a rank sees its own GPU alone
            "MASTER_ADDR": "127.0.0.1" if alone else places[0]["host"],
            "MASTER_PORT": str(places[0]["port"]),
        }
        begun = [self.actors[name].begin.remote(json.dumps({**env, "RANK": str(i)})) for i, name in enumerate(names)]
        self.ray.get(begun, timeout=_ANSWER_SECONDS)
        return {"names": names}

    def poll(self, offsets: dict[str, int]) -> dict[str, Any]:
        """The status of each job with its log from an offset on; `missing` where Ray knows no living actor, and
        nothing for an actor that does not answer now."""
        answers: dict[str, Any] = {}
        for name, offset in offsets.items():
            if (actor := self.known(name)) is None:
                answers[name] = {"missing": True}
            elif name not in self.pending:
                self.pending[name] = actor.status.remote(offset)
        waiting = {ref: name for name, ref in self.pending.items()}
        ready = self.ray.wait([*waiting], num_returns=len(waiting), timeout=_POLL_SECONDS)[0] if waiting else []
        for ref in ready:
            name = waiting[ref]
            del self.pending[name]
            try:
                answers[name] = json.loads(self.ray.get(ref))
            except self.ray.exceptions.ActorUnavailableError:
                continue
            except self.ray.exceptions.RayActorError:
                self.actors.pop(name, None)  # perhaps another driver has made a new one
        if offsets.keys() - answers.keys() and _cluster(self.head) not in (None, self.cluster):
            sys.exit("the head is another one, which does not know the actors: another bridge makes them")
        return answers

    def stop(self, name: str, seconds: float) -> dict[str, Any]:
        """Stops a job for good, and its actor."""
        status: dict[str, Any] = {}
        if (actor := self.known(name)) is None:
            return status
        with contextlib.suppress(self.ray.exceptions.RayError):
            status = json.loads(self.ray.get(actor.stop.remote(seconds), timeout=seconds + _ANSWER_SECONDS))
        self.ray.kill(actor, no_restart=True)
        self.actors.pop(name, None)
        self.pending.pop(name, None)
        deadline = time.monotonic() + _FREE_SECONDS
        while time.monotonic() < deadline:  # until the name is free
            try:
                self.ray.get_actor(name, namespace=self.run)
            except ValueError:
                break
            time.sleep(0.1)
        return status

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to one request."""
        match request.pop("call"):
            case "start":
                return self.start(**request)
            case "group":
                return self.start_group(**request)
            case "poll":
                return self.poll(**request)
            case "stop":
                return self.stop(**request)
            case call:
                raise ValueError(f"unknown call {call!r}")


def main() -> None:
    """Connects to the cluster, and answers until the socket is closed."""
    descriptor, address, run = sys.argv[1:]
    line = socket.socket(fileno=int(descriptor))

    def send(answer: dict[str, Any]) -> None:
        line.sendall(json.dumps(answer).encode() + b"\n")

    try:
        head = _head(address)
        import ray

        ray.init(address=head, namespace=run, log_to_driver=False, configure_logging=False)
        driver = _Driver(head, run)
    except UserError as e:
        return send({"refused": str(e)})
    except Exception as e:
        return send({"error": first_line(e)})
    send({"head": head})
    for text in line.makefile("r"):
        try:
            answer = driver.answer(json.loads(text))
        except UserError as e:
            answer = {"refused": str(e)}
        except Exception as e:
            answer = {"error": f"{type(e).__name__}: {first_line(e)}"}
        send(answer)


if __name__ == "__main__":
    main()
