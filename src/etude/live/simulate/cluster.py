"""The processes of the demo: a cluster of two servers, of the control and of the canary, and the gateway before it."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from etude import processes, runfolder
from etude.config import LiveConfig, ServerConfig, WeightSource, bundled, validate
from etude.errors import UserError
from etude.live.log.accounts import Accounts
from etude.live.log.records import LivePolicy
from etude.live.log.tenants import create_key, digest_of, list_keys, revoke_key, set_policy
from etude.live.release.operations import ReleaseSite, open_site
from etude.live.simulate.sizes import DemoSizes
from etude.run.engines import engine_url, spawn_engine
from etude.store import open_store
from etude.weights import model_folder, newest_manifest

_START_SECONDS = 300.0
_FIRM, _KEY = "firm", "users"


@dataclass(frozen=True)
class DemoCluster:
    """A cluster of two servers, and the gateway before them."""

    folder: Path
    logs: Path
    site: ReleaseSite
    control: str  # URL
    gateway: str
    key: str  # of the users' firm
    secret: str  # with which it signs their names


@contextmanager
def serve(folder: Path, sizes: DemoSizes) -> Iterator[DemoCluster]:
    """The running cluster of the demo in a folder. A later start serves what the stores hold, at other ports. Raises
    UserError or RunFailed."""
    children: list[processes.Child] = []
    logs, model = runfolder.new_attempt(folder), model_folder(sizes.folder)
    try:
        stores = [folder / "control", folder / "canary"]
        _publish_base(stores[0], model)
        for number, store in enumerate(stores):
            store.mkdir(exist_ok=True)
            served = ServerConfig(
                model=str(model),
                port=0,
                threads=1,
                cache_mb=sizes.cache_mb,
                served_model_name=(sizes.model.name,),
                source=WeightSource(weights=str(store)),
            )
            children.append(spawn_engine(served, logs, number))
        urls = [engine_url(child, logs, number) for number, child in enumerate(children)]
        path = _write_config(folder, sizes, model, urls, stores)
        site = open_site(validate(LiveConfig, tomllib.loads(path.read_text("utf-8")), str(path)))
        try:
            key = _new_key(site)
            secret = Accounts(Path(site.config.folder)).proxy_secret(digest_of(key))
            ready = logs / "gateway.json"
            words = ["etude.cli.main", "live", "serve", str(path), "--ready-file", str(ready)]
            child = processes.start("gateway", words, logs / "gateway.log")
            children.append(child)
            address = msgspec.json.decode(processes.wait_for_file(ready, child, _START_SECONDS))
            yield DemoCluster(folder, logs, site, urls[0], address["url"], key, secret)
        finally:
            site.engine.dispose()
    finally:
        for child in reversed(children):
            child.stop(10)


def _new_key(site: ReleaseSite) -> str:
    """A new key of the users' firm in place of an earlier one. Accounts are the names that it signs, so they stay."""
    if any(key.name == _KEY and key.revoked is None for key in list_keys(site.engine, _FIRM)):
        revoke_key(site.engine, _FIRM, _KEY)
    key = create_key(site.engine, _FIRM, _KEY, proxy=True)
    set_policy(site.engine, _FIRM, LivePolicy(requests_per_minute=10**6))
    return key


def _write_config(folder: Path, sizes: DemoSizes, model: Path, urls: list[str], stores: list[Path]) -> Path:
    """Writes the recipe with this demo's servers, for the other commands of `etude live`."""
    recipes = [bundled(sizes.live), bundled(sizes.train)]
    if recipes[0] is None or recipes[1] is None:
        raise UserError(f"this installation has no {sizes.live}: install etude's wheel, or work in its repository")
    quoted = {
        name: msgspec.json.encode(value).decode()
        for name, value in {
            "folder": str(folder / "live"),
            "train": str(recipes[1]),
            "base": str(model),
            "url": urls[0],
            "store": str(stores[0]),
            "canary_url": urls[1],
            "canary_store": str(stores[1]),
            "suite": str(folder / "suite"),
        }.items()
    }
    gate = f"\n[gate]\nbase = {quoted['base']}\nsuites = [{quoted['suite']}]\n"
    text = (
        recipes[0]
        .read_text("utf-8")
        .replace('\nstage = "live"\n', f'\nstage = "live"\nfolder = {quoted["folder"]}\ntrain = {quoted["train"]}\n', 1)
        .replace("\n[gate]\n", gate, 1)
    )
    text += (
        f'\n[gateway]\nport = 0\n\n[[clusters]]\nname = "one"\nurls = [{quoted["url"]}]\nstore = {quoted["store"]}\n'
        f"canary_urls = [{quoted['canary_url']}]\ncanary_store = {quoted['canary_store']}\n"
    )
    path = folder / "live.toml"
    runfolder.write(path, text.encode())
    return path


def _publish_base(store: Path, model: Path) -> None:
    """Publishes a model as version 0 of a weight store, if that has none."""
    from etude.models.dtypes import main_dtype
    from etude.models.loading import load_model, named_tensors
    from etude.weights.publisher import Publisher

    weights = open_store(str(store))
    if newest_manifest(weights) is None:
        Publisher(weights).publish(0, named_tensors(load_model(model, dtype=main_dtype(model))), (), {})
