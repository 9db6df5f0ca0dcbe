"""Secrets of a configuration: the placeholders that a run folder keeps, and the environment that holds the values."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, cast

from etude.config.run import RLConfig
from etude.config.sections import validate
from etude.errors import UserError

_URL = re.compile(r"(?P<head>[A-Za-z][A-Za-z0-9+.-]*://[^/\s:@]*):(?P<password>[^/\s@]*)@")
_LEDGER = re.compile(r"(?P<head>://[^:/@]*):(?P<password>[^@]*)@")  # the parts that SQLAlchemy reads
_QUERY = re.compile(r"(?<=[?&])password=([^&\s]*)&?")
_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE)
_REFERENCE = re.compile(r"\$([A-Za-z_][A-Za-z0-9_]*)")
_MASK = "***"


def ledger_password(config: RLConfig) -> str | None:
    """The password in the URL of the ledger, in the URL's own encoding."""
    match = _LEDGER.search(config.ledger or "") or _QUERY.search(config.ledger or "")
    return match[match.lastindex or 0] if match else None


def without_secrets(config: RLConfig) -> RLConfig:
    """The configuration in the form in which a run folder keeps it: the ledger's URL without a password, other URLs
    with `***` in its place, and `$NAME` for each variable of the agent whose name shows that it is secret."""
    kept: dict[str, Any] = config.model_dump(mode="json")
    if config.ledger:
        kept["ledger"] = _QUERY.sub("", _LEDGER.sub(r"\g<head>@", config.ledger)).rstrip("?&")
    if agent := kept["rollout"]["agent"]:
        agent["environment"] |= {name: f"${name}" for name in _secret_names(agent["environment"])}
    return validate(RLConfig, _masked(kept), "the configuration")


def secrets(config: RLConfig) -> list[str]:
    """The secrets that `without_secrets` leaves out, longest first."""
    values = {match["password"] for text in _texts(config.model_dump(mode="json")) for match in _URL.finditer(text)}
    values.add(ledger_password(config) or "")
    if config.rollout.agent is not None:
        environment = config.rollout.agent.environment
        values |= {environment[name] for name in _secret_names(environment)}
    return sorted(values - {""}, key=len, reverse=True)


def redacted(text: str, config: RLConfig) -> str | None:
    """The text of a configuration with `***` for its secrets; None if a secret may be in the text in another
    spelling."""
    for secret in secrets(config):
        if secret not in text:
            return None
        text = text.replace(secret, _MASK)
    return text


def with_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The agent's variables; `$NAME` is taken from the environment of this process. Raises UserError."""
    values: dict[str, str] = {}
    for name, value in environment.items():
        reference = _REFERENCE.fullmatch(value)
        if reference and reference[1] not in os.environ:
            raise UserError(
                f"rollout.agent.environment.{name} needs the variable {reference[1]} in the environment of etude: set "
                "it, or resume with the configuration that the run began with"
            )
        values[name] = os.environ[reference[1]] if reference else value
    return values


def check_whole(config: RLConfig) -> None:
    """Raises UserError for a configuration from a run folder that lacks a secret."""
    kept = config.model_dump(mode="json")
    for table, values in kept.items():
        for text in _texts(values):
            if f":{_MASK}@" in text:
                raise UserError(
                    f"the run folder does not keep the password of a URL in `{table}`: resume with the configuration "
                    "that the run began with"
                )
    if config.rollout.agent is not None:
        with_environment(config.rollout.agent.environment)


def _secret_names(environment: Mapping[str, str]) -> list[str]:
    return [name for name, value in environment.items() if _NAME.search(name) and not _REFERENCE.fullmatch(value)]


def _masked(value: Any) -> Any:
    if isinstance(value, str):
        return _URL.sub(rf"\g<head>:{_MASK}@", value)
    if isinstance(value, dict):
        return {key: _masked(inner) for key, inner in cast(dict[str, Any], value).items()}
    if isinstance(value, list):
        return [_masked(inner) for inner in cast(list[Any], value)]
    return value


def _texts(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in cast(dict[str, Any], value).values():
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in cast(list[Any], value):
            yield from _texts(inner)
