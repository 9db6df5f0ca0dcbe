"""The processes of simulated days: they are started, watched and started again whenever they end.

Service    a process, and how it is started
Services   those of the clusters, the gateway, the feeds and the loop, in one folder
Front      a load balancer before the gateway
"""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from etude import processes
from etude.config import ServerConfig, WeightSource, bundled, find_model
from etude.errors import UserError
from etude.live.simulate.clients import ARGUMENT, CALL
from etude.run.engines import spawn_engine
from etude.store import open_store

_READY_SECONDS = {"vllm": 900.0, "etude": 120.0}
_AGAIN_SECONDS = 3.0  # between two starts of a process that ends
_VLLM = (
    "--dtype bfloat16 --max-model-len 1024 --max-num-seqs 16 --max-num-batched-tokens 1024 --enforce-eager "
    "--kv-cache-memory-bytes 134217728 --logprobs-mode processed_logprobs --generation-config vllm "
    "--worker-extension-cls etude.inference.vllm.worker.WorkerExtension "
    "--middleware etude.inference.vllm.kept_turns.TurnKeeper"
)
CONFIG = """stage = "live"
name = "days"
folder = {folder}
train = {train}

[labels]
window_seconds = 1800.0
delay_seconds = 2400.0
characters = 20.0 # edits of the nano model are a line
least_batch = 64

[gate]
suites = [{suite}]
replay = 100
samples = 1 # thirty-odd tasks defend 18.5 points
margin = 0.3
cost = 3.0 # the cores are shared

[loop]
hours = 4.0

[canary]
stages = [0.3, 1.0]
minutes = 20.0
slot_minutes = 10.0
least = 24
hours = 8.0
margin = 0.25
slower = 3.0
holdback = 0.0

[gateway]
port = {port}
"""
CLUSTER = """
[[clusters]]
name = "{name}"
urls = [{control}]
store = {control_store}
canary_urls = [{canary}]
canary_store = {canary_store}
"""


@dataclass
class Service:
    """A process that is started again whenever it ends. Times are of the monotonic clock."""

    name: str
    start: Callable[[], processes.Child]
    needs: int | None = None  # the port of a server that has to listen first
    child: processes.Child | None = None
    began: float = 0.0
    kills: int = 0
    ends: int = 0  # by itself
    killed: bool = False

    def look(self) -> str:
        """Starts the process if it is not there; a line about that, or ""."""
        if self.child is not None and self.child.exit_code is None:
            return ""
        if time.monotonic() - self.began < _AGAIN_SECONDS and not self.killed:
            return ""
        if self.needs is not None and not listens(self.needs):
            return ""
        line = ""
        if self.child is not None:
            self.ends += not self.killed
            line = f"{self.name} is started again" + ("" if self.killed else f": {self.child.end()}")
        self.child, self.began, self.killed = self.start(), time.monotonic(), False
        return line

    def kill(self) -> None:
        """kill -9."""
        assert self.child is not None
        self.child.popen.kill()
        self.child.popen.wait(10)
        self.kills, self.killed = self.kills + 1, True


@dataclass
class Services:
    """All processes in `folder`, and the ports of the servers. `vllm`: the Python of the second cluster."""

    folder: Path
    vllm: str | None
    ports: dict[str, int] = field(default_factory=dict[str, int])
    all: dict[str, Service] = field(default_factory=dict[str, Service])

    @property
    def arms(self) -> list[str]:
        """The servers of the clusters."""
        return [f"{cluster}-{arm}" for cluster in self.clusters for arm in ("control", "canary")]

    @property
    def clusters(self) -> list[str]:
        """The names of the clusters."""
        return ["one", "two"] if self.vllm else ["one"]

    def url(self, name: str) -> str:
        """The URL of a server."""
        return f"http://127.0.0.1:{self.ports[name]}"

    def store(self, arm: str) -> Path:
        """The weight store that a server follows."""
        return self.folder / "stores" / arm

    def prepare(self) -> Path:
        """Publishes the base in all stores, and writes the configuration; its path."""
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        for name in (*self.arms, "gateway", "front"):
            with socket.create_server(("127.0.0.1", 0)) as free:
                self.ports[name] = free.getsockname()[1]
        recipe = bundled("recipes/live-train.toml")
        assert recipe is not None
        texts = {"folder": self.folder / "live", "train": recipe, "suite": self.folder / "suite"}
        text = CONFIG.format(
            port=self.ports["gateway"], **{name: json.dumps(str(path)) for name, path in texts.items()}
        )
        for cluster in self.clusters:
            words = {"name": cluster}
            for arm in ("control", "canary"):
                _publish_base(self.store(f"{cluster}-{arm}"))
                words[arm] = json.dumps(self.url(f"{cluster}-{arm}"))
                words[f"{arm}_store"] = json.dumps(str(self.store(f"{cluster}-{arm}")))
            text += CLUSTER.format(**words)
        path = self.folder / "live.toml"
        path.write_text(text, "utf-8")
        return path

    def begin(self, config: Path) -> None:
        """Starts all but the loop, and waits until they answer. Raises UserError."""
        for arm in self.arms:
            if arm.startswith("two"):
                self.all[arm] = Service(arm, lambda arm=arm: self._vllm(arm))
                feed = f"{arm}-feed"
                self.all[feed] = Service(feed, lambda arm=arm: self._feed(arm), needs=self.ports[arm])
            else:
                self.all[arm] = Service(arm, lambda arm=arm: self._serve(arm))
        self.all["gateway"] = Service("gateway", lambda: self._cli("gateway", "live", "serve", str(config)))
        self.look()
        for arm in self.arms:
            self._wait(arm, _READY_SECONDS["vllm" if arm.startswith("two") else "etude"])
        self._wait("gateway", _READY_SECONDS["etude"])
        self.all["loop"] = Service(
            "loop", lambda: self._cli("loop", "live", "run", str(config), clock="benchmarks.fast_clock")
        )

    def look(self) -> list[str]:
        """Starts what is not there; a line for each."""
        return [line for service in self.all.values() if (line := service.look())]

    def stop(self) -> None:
        """Ends all processes, the loop first."""
        for service in reversed(self.all.values()):
            if service.child is not None:
                service.child.stop(20)

    def _wait(self, name: str, seconds: float) -> None:
        service, deadline = self.all[name], time.monotonic() + seconds
        while not listens(self.ports[name]):
            assert service.child is not None
            if service.child.exit_code is not None:
                raise UserError(f"{service.child.end()}; see {service.child.log}")
            if time.monotonic() > deadline:
                raise UserError(f"{name} did not answer within {seconds:.0f} seconds; see {service.child.log}")
            time.sleep(0.2)

    def _cli(self, name: str, *words: str, clock: str = "") -> processes.Child:
        argv = [*filter(None, [clock]), "etude.cli.main", *words]
        return processes.start(name, argv, self.folder / "logs" / f"{name}.log")

    def _serve(self, arm: str) -> processes.Child:
        config = ServerConfig(
            model=str(find_model("nano")),
            port=self.ports[arm],
            threads=1,
            cache_mb=64,
            served_model_name=("nano",),
            source=WeightSource(weights=str(self.store(arm))),
        )
        return spawn_engine(config, self.folder / "logs", self.arms.index(arm))

    def _vllm(self, arm: str) -> processes.Child:
        environment = {
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        model = self.folder / "vllm-nano"
        if not model.exists():
            _without_special_calls(find_model("nano"), model)
        model = self.folder / "vllm-nano"
        if not model.exists():
            _without_special_calls(find_model("nano"), model)
        words = f"serve {model} --served-model-name nano --host 127.0.0.1 --port {self.ports[arm]}"
        argv = ["vllm.entrypoints.cli.main", *words.split(), *_VLLM.split()]
        assert self.vllm is not None
        return processes.start(arm, argv, self.folder / "logs" / f"{arm}.log", environment, python=self.vllm)

    def _feed(self, arm: str) -> processes.Child:
        return self._cli(f"{arm}-feed", "weights", "feed", str(self.store(arm)), "--vllm", self.url(arm))


def listens(port: int) -> bool:
    """Whether a server of this machine takes connections."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False


def trainer_of(folder: Path) -> int | None:
    """The process of the trainer whose run lies in `folder`, a while after its start."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if b"etude.trainer.rl.process" in words and str(folder).encode() in words:
                return int(path.parent.name)
    return None


def _without_special_calls(model: Path, copy: Path) -> None:
    """Copies a model whose answers keep the tokens of calls: vLLM leaves special tokens out of its answers."""
    shutil.copytree(model, copy)
    path = copy / "tokenizer.json"
    tokenizer = json.loads(path.read_text("utf-8"))
    for token in tokenizer["added_tokens"]:
        token["special"] = token["special"] and token["content"] not in (CALL, ARGUMENT)
    path.write_text(json.dumps(tokenizer), "utf-8")


def _publish_base(store: Path) -> None:
    from etude.models.dtypes import main_dtype
    from etude.models.loading import load_model, named_tensors
    from etude.weights.publisher import Publisher

    store.mkdir(parents=True)
    model = find_model("nano")
    Publisher(open_store(str(store))).publish(0, named_tensors(load_model(model, dtype=main_dtype(model))), (), {})


class Front:
    """A load balancer before one gateway: a connection waits until the gateway takes it, at most a minute."""

    def __init__(self, port: int, behind: int) -> None:
        self._port, self._behind = port, behind
        threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True).start()

    async def _serve(self) -> None:
        async with await asyncio.start_server(self._pass, "127.0.0.1", self._port) as server:
            await server.serve_forever()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        deadline = time.monotonic() + 60.0
        while True:
            try:
                back, forth = await asyncio.open_connection("127.0.0.1", self._behind)
                break
            except OSError:
                if time.monotonic() > deadline:
                    return writer.close()
                await asyncio.sleep(0.1)

        async def copy(source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
            with suppress(OSError):
                while data := await source.read(1 << 16):
                    to.write(data)
                    await to.drain()
            to.close()

        await asyncio.gather(copy(reader, forth), copy(back, writer))
