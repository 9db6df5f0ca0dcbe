"""Secrets of a configuration are in no file of its run, and a run can be resumed all the same."""

import stat
from pathlib import Path

import pytest

from etude import runfolder
from etude.cli.overlays import configuration_text, read_toml
from etude.config import RLConfig, validate
from etude.config.secrets import check_whole, ledger_password, with_environment, without_secrets
from etude.errors import UserError

CANARY = "s3cr3t/Canary"
TOML = f"""
ledger = "postgresql://etude:{CANARY}@db.example/runs?sslmode=require"
[tasks]
repository = "x==1.0"
sha256 = "{"0" * 64}"
[rollout]
apply = "https://user:{CANARY.lower().replace("/", "")}@apply.example/v1"
[rollout.agent]
command = "agent"
environment = {{ OPENAI_API_KEY = "sk-{CANARY}", MODE = "fast", OTHER_TOKEN = "$MY_TOKEN" }}
"""


@pytest.fixture
def config(tmp_path: Path) -> RLConfig:
    (tmp_path / "run.toml").write_text(TOML)
    return validate(RLConfig, read_toml(tmp_path / "run.toml"), "run.toml")


def test_no_file_of_a_run_holds_a_secret(config: RLConfig, tmp_path: Path) -> None:
    overrides = ["--ledger", config.ledger or ""]
    run = tmp_path / "run"
    runfolder.create(run, config, configuration_text([tmp_path / "run.toml"], overrides))
    for path in run.iterdir():
        assert "canary" not in path.read_text().lower(), path
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    kept = runfolder.load_config(run)
    assert kept == without_secrets(config) == without_secrets(kept)
    assert kept.ledger == "postgresql://etude@db.example/runs?sslmode=require"
    assert kept.rollout.apply == "https://user:***@apply.example/v1"
    assert kept.rollout.agent is not None
    assert kept.rollout.agent.environment == {
        "OPENAI_API_KEY": "$OPENAI_API_KEY", "MODE": "fast", "OTHER_TOKEN": "$MY_TOKEN",
    }  # fmt: skip
    assert ledger_password(config) == CANARY
    assert "fast" in (run / "config.toml").read_text()


def test_a_secret_that_is_written_with_escapes_is_not_kept(tmp_path: Path, config: RLConfig) -> None:
    text = TOML.replace("s3cr3t", "s3cr3\\u0074")
    assert text != TOML
    runfolder.create(tmp_path / "run", config, text)
    assert "Canary" not in (tmp_path / "run/config.toml").read_text()


def test_a_password_in_the_query_of_the_ledger(config: RLConfig) -> None:
    url = "postgresql://etude@/runs?host=/tmp&password=hush&sslmode=require"
    given = config.model_copy(update={"ledger": url})
    assert ledger_password(given) == "hush"
    assert without_secrets(given).ledger == "postgresql://etude@/runs?host=/tmp&sslmode=require"


def test_a_configuration_without_secrets_is_kept_as_it_is() -> None:
    data = {"ledger": "sqlite:////tmp/a:b@c/ledger.db", "tasks": {"repository": "x==1.0", "sha256": "0" * 64}}
    config = validate(RLConfig, data, "x")
    assert without_secrets(config) == config
    check_whole(config)


def test_what_a_run_folder_lacks_is_named(config: RLConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = without_secrets(config)
    with pytest.raises(UserError, match="does not keep the password of a URL in `rollout`"):
        check_whole(kept)
    agent = kept.rollout.agent
    assert agent is not None
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("MY_TOKEN", "mine")
    with pytest.raises(UserError, match="OPENAI_API_KEY needs the variable OPENAI_API_KEY in the environment"):
        with_environment(agent.environment)
    monkeypatch.setenv("OPENAI_API_KEY", "again")
    assert with_environment(agent.environment) == {"OPENAI_API_KEY": "again", "MODE": "fast", "OTHER_TOKEN": "mine"}


def test_a_relay_with_a_password_in_its_url_is_refused() -> None:
    """The engines' configurations lie in the run folder as well."""
    data = {"tasks": {"repository": "x==1.0", "sha256": "0" * 64}, "weights": {"relay": "http://u:pw@relay:80/x"}}
    with pytest.raises(UserError, match="no user in its URL"):
        validate(RLConfig, data, "x")
    data["weights"] = {"relay": "http://relay:80/x@y"}
    validate(RLConfig, data, "x")
