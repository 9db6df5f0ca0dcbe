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
from dataclasses import dataclass
from typing import Any

from etude.errors import UserError, first_line
from etude.fleet.keeper import DRAIN_SECONDS, digest

_ANSWER_SECONDS, _POLL_SECONDS, _FREE_SECONDS = 10.0, 2.0, 20.0
_BEGIN_SECONDS, _LOOK_SECONDS = 60.0, 0.1
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


@dataclass
class _Stopping:
    """A job that is being stopped for good: the answers of its actor, and times on the monotonic clock."""

    actor: Any
    alive: Any  # the answer to a question that waits for nothing
    status: Any  # the last status, once the child has ended
    wake: float  # until then an actor answers, or has never begun
    last: float
    ended: dict[str, Any] | None = None  # set when the actor is ended
    free: float = 0.0  # until then its name is free


class _Driver:
    """This process as a driver of Ray: the actors of a run by their names."""

    def __init__(self, head: str, run: str) -> None:
        import ray

        from etude.fleet.ray_actor import JobActor

        self.ray, self.run, self.kind = ray, run, ray.remote(JobActor)
        self.actors: dict[str, Any] = {}
        self.pending: dict[str, Any] = {}  # by name, the status on its way
        self.stopping: dict[str, _Stopping] = {}
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
            while not self.stop(name, DRAIN_SECONDS)["done"]:
                time.sleep(_LOOK_SECONDS)
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

    def start_group(self, order: dict[str, Any], count: int) -> dict[str, Any]:
        """Starts ranks together once their placement group has room; nothing but `has`, all that the cluster has, as
        long as there is none. They end with this process."""
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        job = order["job"]
        share = {"CPU": job["cpus"], **({"GPU": job["gpus"]} if job["gpus"] else {})}
        self.group = self.group or placement_group([share] * count, strategy="PACK")
        if not self.group.wait(0):
            return self.has()
        names = [f"{job['name']}-{rank}" for rank in range(count)]
        for rank, name in enumerate(names):
            own = {**order, "job": {**job, "name": name}}
            place = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=rank)
            self.actors[name] = self.kind.options(
                max_restarts=0, max_concurrency=4, num_cpus=job["cpus"], num_gpus=job["gpus"], scheduling_strategy=place
            ).remote(json.dumps(own))
        refs = [self.actors[name].place.remote() for name in names]
        places = [json.loads(text) for text in self.ray.get(refs, timeout=_BEGIN_SECONDS)]
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

    def has(self) -> dict[str, Any]:
        """The CPUs and GPUs of all nodes."""
        resources = self.ray.cluster_resources()
        return {"has": [resources.get("CPU", 0.0), resources.get("GPU", 0.0)]}

    def drop_group(self) -> dict[str, Any]:
        """Gives the place of the ranks back."""
        if self.group is not None:
            from ray.util.placement_group import remove_placement_group

            remove_placement_group(self.group)
            self.group = None
        return {}

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

    def stop(self, name: str, seconds: float, offset: int = 0) -> dict[str, Any]:
        """A look at a job that is to stop for good, with its actor; the first one begins it, and none waits, so that
        many stop at once. With `done` all is over: the last status, with the log from `offset` on, and the name is
        free."""
        now = time.monotonic()
        if name not in self.stopping:
            if (actor := self.known(name)) is None:
                return {"done": True}
            wake, last = now + _ANSWER_SECONDS, now + seconds + _ANSWER_SECONDS
            answers = actor.digest.remote(), actor.stop.remote(seconds, offset)
            self.stopping[name] = _Stopping(actor, *answers, wake, last)
        one = self.stopping[name]
        if one.ended is None:
            silent = now > one.wake and not self.came(one.alive)
            if not (self.came(one.status) or silent or now > one.last):
                return {"done": False}
            one.ended, one.free = {}, now + _FREE_SECONDS
            if self.came(one.status):
                with contextlib.suppress(self.ray.exceptions.RayError):
                    one.ended = json.loads(self.ray.get(one.status))
            self.ray.kill(one.actor, no_restart=True)
            self.actors.pop(name, None)
            self.pending.pop(name, None)
        if now < one.free:
            with contextlib.suppress(ValueError):
                self.ray.get_actor(name, namespace=self.run)
                return {"done": False}
        del self.stopping[name]
        return {"done": True, **(one.ended or {})}

    def came(self, ref: Any) -> bool:
        """Whether an answer, or an error in its place, has come."""
        return bool(self.ray.wait([ref], timeout=0)[0])

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to one request."""
        match request.pop("call"):
            case "start":
                return self.start(**request)
            case "group":
                return self.start_group(**request)
            case "poll":
                return self.poll(**request)
            case "drop group":
                return self.drop_group()
            case "has":
                return self.has()
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
