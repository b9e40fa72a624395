"""The agent's configuration: unknown and wrong fields are named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sandbox_server.agent.config import ConfigError, Listen, TlsListen, parse_config

LEAST: dict[str, Any] = {"sandbox_id": "s-1", "token": "t", "listen": {"unix": "/run/a.sock"}, "base_dir": "/base"}
TLS: dict[str, Any] = {"host": "127.0.0.1", "port": 0, "certificate": "the certificate", "key": "the key"}


def test_a_minimal_configuration_has_the_defaults() -> None:
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
        ({"listen": {"tls": TLS}}, "listen"),
        ({"listen": {"unix": "/run/a.sock", "tls": {"host": "127.0.0.1"}}}, "listen.tls must have host, port, certificate, key"),
        ({"listen": {"unix": "/run/a.sock", "tls": {**TLS, "host": "localhost"}}}, "listen.tls.host must be an IP address"),
        ({"listen": {"unix": "/run/a.sock", "tls": {**TLS, "port": 65536}}}, "listen.tls.port"),
        ({"listen": {"unix": "/run/a.sock", "tls": {**TLS, "port": True}}}, "listen.tls.port"),
        ({"listen": {"unix": "/run/a.sock", "tls": {**TLS, "key": None}}}, "key must be texts"),
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


def test_the_tls_settings_are_read_and_the_key_is_not_printed() -> None:
    config = parse_config(json.dumps({**LEAST, "listen": {"unix": "/run/a.sock", "tls": TLS}}).encode())

    assert config.listen == Listen("/run/a.sock", TlsListen(**TLS))
    assert "the key" not in repr(config)


@pytest.mark.parametrize("document", [b"", b"[]", b"{", b"null"])
def test_a_document_that_is_no_json_object_is_refused(document: bytes) -> None:
    with pytest.raises(ConfigError):
        parse_config(document)


@pytest.mark.parametrize("name", sorted(LEAST))
def test_a_missing_field_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        parse_config(json.dumps({key: value for key, value in LEAST.items() if key != name}).encode())
