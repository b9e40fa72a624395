"""The agent's configuration: unknown and wrong fields are named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sandbox_server.agent.config import ConfigError, parse_config

LEAST: dict[str, Any] = {"sandbox_id": "s-1", "token": "t", "listen": {"unix": "/run/a.sock"}, "base_dir": "/base"}


def test_the_least_there_can_be_has_the_defaults() -> None:
    config = parse_config(json.dumps(LEAST).encode())

    assert (config.slots, config.isolation, config.allow_none, config.limits.processes) == (10, "auto", False, 512)
    assert "'t'" not in repr(config)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"nonsense": 1}, "nonsense"),
        ({"slots": 0}, "slots"),
        ({"slots": "10"}, "slots"),
        ({"slots": True}, "slots"),
        ({"isolation": "docker"}, "isolation"),
        ({"listen": {"tcp": 1}}, "listen"),
        ({"base_dir": "relative"}, "relative"),
        ({"expose": ["relative"]}, "relative"),
        ({"limits": {"disk": 1}}, "limits.disk"),
        ({"limits": {"processes": 0}}, "limits.processes"),
        ({"limits": {"processes": None}}, "limits.processes"),
        ({"env_vars": {"A=B": "c"}}, "A=B"),
        ({"env_vars": {"A": "b\0"}}, "A"),
        ({"env_vars": {"A": 1}}, "A"),
        ({"token": 5}, "token"),
        ({"local": False}, "local"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named.replace(".", r"\.")):
        parse_config(json.dumps({**LEAST, **change}).encode())


@pytest.mark.parametrize("document", [b"", b"[]", b"{", b"null"])
def test_what_is_no_object_is_refused(document: bytes) -> None:
    with pytest.raises(ConfigError):
        parse_config(document)


@pytest.mark.parametrize("name", sorted(LEAST))
def test_what_is_missing_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        parse_config(json.dumps({key: value for key, value in LEAST.items() if key != name}).encode())
