"""fleet.toml: its tables, and what it refuses."""

import pytest

from etude.config import FleetConfig, RLConfig, TasksConfig, check_fleet, check_ranks_apart, validate
from etude.errors import UserError

EU = {"name": "eu"}


def fleet(**tables) -> FleetConfig:
    return validate(FleetConfig, tables, "fleet.toml")


def test_names_come_from_tables():
    tables = fleet(
        engines=[{**EU, "placer": "ray", "count": 3, "gpus": 1, "address": "head:6379"},
                 {"name": "us", "placer": "attach", "urls": ["http://us:8000"]}],
        players={"count": 2},
        trainer={"placer": "ray", "address": "head:6379"},
    )  # fmt: skip
    assert [table.names for table in tables.engines] == [("eu-0", "eu-1", "eu-2"), ()]
    assert tables.players.names == ("players-0", "players-1")
    assert tables.addresses == ("head:6379",)
    assert validate(FleetConfig, tables.model_dump(mode="json"), "fleet.json") == tables


@pytest.mark.parametrize(("tables", "sentence"), [
    ({}, r"write one"),
    ({"engines": EU}, r"engines is a list of tables: write \[\[engines\]\] above the keys of each"),
    ({"engines": [EU, EU]}, r"two tables \[\[engines\]\] are called 'eu'"),
    ({"engines": [{"name": "players"}]}, r"called 'players', which is the name of another process"),
    ({"engines": [{"name": "E U"}]}, r"engines.0.name"),
    ({"engines": [{**EU, "cont": 1}]}, r"unknown key engines.0.cont; did you mean engines.count\?"),
    ({"engines": [{**EU, "placer": "slurm"}]}, r"engines.0.placer"),
    ({"engines": [{**EU, "count": 0}]}, r"engines.0.count"),
    ({"engines": [{**EU, "urls": ["http://a"]}]}, r'set placer = "attach"'),
    ({"engines": [{**EU, "placer": "attach"}]}, r'placer = "attach" needs urls'),
    ({"engines": [{**EU, "placer": "attach", "urls": ["http://a"], "count": 2}]}, r"starts no servers: drop count"),
    ({"engines": [{**EU, "placer": "attach", "urls": ["http://a"], "gpus": 1}]}, r"starts no servers: drop gpus"),
    ({"engines": [{**EU, "placer": "attach", "urls": ["http://u@a"]}]}, r"is not a URL"),
    ({"engines": [{**EU, "placer": "attach", "urls": ["http://a", "http://a/"]}]}, r"name the server http://a twice"),
    ({"engines": [{**EU, "address": "head:1"}]}, r'set placer = "ray", or drop address'),
    ({"engines": [{**EU, "placer": "ray", "address": "ray://head:10001"}]}, r"client protocol"),
    ({"players": {"placer": "ray", "address": "head"}}, r"is not the address of a head"),
    ({"players": {"placer": "attach"}}, r"players.placer"),
    ({"trainer": {"count": 2}}, r"unknown key trainer.count"),
])  # fmt: skip
def test_mistakes_are_named(tables, sentence):
    with pytest.raises(UserError, match=sentence):
        fleet(**tables)


@pytest.mark.parametrize(("tables", "run", "sentence"), [
    ({"engines": [{**EU, "gpus": 1}]}, {}, r'have gpus = 1, and inference.device is "cpu"'),
    ({"engines": [EU]}, {"inference": {"device": "cuda"}}, r"an engine of 'eu' has 1 workers on GPUs: set gpus = 1"),
    ({"engines": [EU]}, {"inference": {"urls": ["http://a"]}}, r"inference.urls are servers, too"),
    ({"engines": [EU]}, {"inference": {"servers": 2}}, r"drop inference.servers"),
    ({"engines": [EU]}, {"inference": {"port": 8000}}, r"drop inference.port"),
    ({"trainer": {}}, {"trainer": {"launcher": "external"}}, r"drop trainer.launcher"),
])  # fmt: skip
def test_a_fleet_must_fit_the_run(tables, run, sentence):
    config = validate(RLConfig, {"tasks": {"repository": "r"}, **run}, "run.toml")
    with pytest.raises(UserError, match=sentence):
        check_fleet(fleet(**tables), config, "fleet.toml")


def test_a_fleet_that_fits_is_not_refused():
    config = RLConfig(tasks=TasksConfig(repository="r"))
    attached = {"name": "us", "placer": "attach", "urls": ["http://us:8000"]}
    check_fleet(fleet(engines=[EU, attached], players={}, trainer={}), config, "fleet.toml")


@pytest.mark.parametrize(("mesh", "inference", "sentence"), [
    ({"shard": 4}, {"device": "cuda:3", "cache_mb": 9},
     r'inference.device = "cuda:3" is that of a rank of trainer.mesh, which takes cuda:0 to cuda:3: set "cuda:4"'),
    ({"context": 4}, {"engine": "vllm", "device": "cuda"}, r'inference.device = "cuda" is that of a rank'),
])  # fmt: skip
def test_engines_of_the_run_and_ranks_share_no_device(mesh, inference, sentence):
    """A fleet places engines, or ranks, on other GPUs."""

    def run(**trainer):
        tables = {"trainer": {"device": "cuda", "mesh": mesh} | trainer, "inference": inference}
        return validate(RLConfig, {"tasks": {"repository": "r"}, **tables}, "run.toml")

    for tables in (None, {"players": {}}, {"trainer": {}}):
        with pytest.raises(UserError, match=sentence):
            check_ranks_apart(run(), None if tables is None else fleet(**tables))
    for tables in ({"engines": [{**EU, "placer": "ray", "gpus": 1}]}, {"trainer": {"placer": "ray"}}):
        check_ranks_apart(run(), fleet(**tables))
    check_ranks_apart(run(launcher="external"), None)
    other = run().model_copy(update={"inference": run().inference.model_copy(update={"device": "cuda:4"})})
    check_ranks_apart(other, None)
