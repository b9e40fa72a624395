"""What the operator decides: everything unknown, unreadable or out of range is one line that says where and what is allowed."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from sandbox_server.api.contract.requests import PoolSpecBody
from sandbox_server.api.contract.specs import spec_of
from sandbox_server.api.limits import Limits
from sandbox_server.api.tenants import Tenant
from sandbox_server.backends.registry import load_backend
from sandbox_server.core.errors import NotImplementedHere
from sandbox_server.core.types import LocalSpec, PoolSpec
from sandbox_server.settings import Settings, SettingsError, load_settings
from sandbox_server.settings.environment import CLIENTS_OWN, EnvironmentModel, default_state_dir
from sandbox_server.settings.file import NomadModel, SettingsFile, TenantModel
from tests.contract.contract import CONTRACT


def with_file(path: Path, text: str, **environ: str) -> Settings:
    config = path / "pools.yaml"
    config.write_text(text)
    return load_settings({"SANDBOX_CONFIG": str(config), **environ})


def test_nothing_said_is_one_default_pool_and_no_tenants() -> None:
    settings = load_settings({})

    assert (settings.pools, settings.default_pool, settings.tenants, settings.authentication_disabled) == (
        {"default": PoolSpec(shared=True)},
        "default",
        (),
        False,
    )
    assert (settings.limits, settings.log_format, settings.log_level, settings.advertise_url) == (Limits(), "json", "info", None)


def test_every_variable_is_read() -> None:
    settings = load_settings(
        {
            "SANDBOX_STATE_DIR": "/s",
            "SANDBOX_TOKENS": "a:one, b:two:with:colons",
            "SANDBOX_AUTH": "none",
            "SANDBOX_ADVERTISE_URL": "https://pool.example:8443/",
            "SANDBOX_LOG_FORMAT": "text",
            "SANDBOX_LOG_LEVEL": "debug",
        }
    )

    assert [(tenant.name, tenant.token, tenant.admin) for tenant in settings.tenants] == [("a", "one", True), ("b", "two:with:colons", True)]
    assert (settings.state_dir, settings.authentication_disabled, settings.advertise_url) == (Path("/s"), True, "https://pool.example:8443")
    assert (settings.log_format, settings.log_level) == ("text", "debug")


def test_the_clients_variables_are_left_alone() -> None:
    load_settings({"SANDBOX_URL": "http://x", "SANDBOX_TOKEN": "t", "PATH": "/bin"})


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"SANDBOX_STATEDIR": "/x"}, "SANDBOX_STATEDIR.*SANDBOX_STATE_DIR"),
        ({"SANDBOX_AUTH": "off"}, "SANDBOX_AUTH.*none"),
        ({"SANDBOX_LOG_FORMAT": "xml"}, "SANDBOX_LOG_FORMAT.*json"),
        ({"SANDBOX_LOG_LEVEL": "loud"}, "SANDBOX_LOG_LEVEL.*debug"),
        ({"SANDBOX_ADVERTISE_URL": "pool:80"}, "SANDBOX_ADVERTISE_URL"),
        ({"SANDBOX_TOKENS": "justatoken"}, "SANDBOX_TOKENS.*name:token"),
        ({"SANDBOX_TOKENS": "a:x,a:y"}, "two tenants.*name.*a"),
        ({"SANDBOX_TOKENS": "a:x,b:x"}, "two tenants.*token"),
        ({"SANDBOX_CONFIG": "/nowhere/pools.yaml"}, "/nowhere/pools.yaml.*No such file"),
    ],
)
def test_a_variable_that_cannot_be_stops_the_start(environ: dict[str, str], named: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(environ)

    assert re.search(named, str(caught.value))
    assert "\n" not in str(caught.value)


def test_no_refusal_shows_a_token() -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings({"SANDBOX_TOKENS": "a:topsecret,b:topsecret"})

    assert "topsecret" not in str(caught.value)


def test_a_file_says_pools_tenants_and_limits(tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("from-a-file\n")
    settings = with_file(
        tmp_path,
        f"""
        pools:
          small: {{slots_per_sandbox: 2, idle_timeout_s: 30, local: {{expose: [/opt]}}, env_vars: {{A: b}}}}
          plain:
        default_pool: small
        tenants:
          - {{name: trainer, token: in-the-file, weight: 2}}
          - {{name: admin, token_file: {token_file}, admin: true}}
        limits: {{batch_calls: 10}}
        """,
    )

    assert settings.pools == {
        "small": PoolSpec(slots_per_sandbox=2, idle_timeout_s=30, local=LocalSpec(expose=("/opt",)), env_vars={"A": "b"}, shared=True),
        "plain": PoolSpec(shared=True),
    }
    assert [(t.name, t.token, t.admin, t.weight, t.max_leases) for t in settings.tenants] == [
        ("trainer", "in-the-file", False, 2, None),
        ("admin", "from-a-file", True, 1.0, None),
    ]
    assert (settings.default_pool, settings.limits.batch_calls) == ("small", 10)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("pools: {default: {slot_per_sandbox: 1}}", r"pools\.default\.slot_per_sandbox: unknown key; allowed are backend, image, slots_per_sandbox"),
        ("pools: {default: {nomad: {adress: x}}}", r"pools\.default\.nomad\.adress: unknown key; allowed are address"),
        ("pools: {default: {slots_per_sandbox: 0}}", r"pools\.default\.slots_per_sandbox: should be greater than or equal to 1"),
        ("pools: {default: {slots_per_sandbox: ten}}", r"pools\.default\.slots_per_sandbox: should be a valid integer"),
        ("pools: {default: {backend: ec2}}", r"pools\.default\.backend: should be 'local'"),
        ("pools: {default: {min_sandboxes: 6}}", r"pools\.default\.min_sandboxes: must not be above max_sandboxes, 5"),
        ("pools: {default: {default_timeout_s: 4000}}", r"pools\.default\.default_timeout_s"),
        ("pools: {default: {allow_hosts: [pypi.org]}}", r"pools\.default\.allow_hosts: needs network: internet"),
        ("pools: {default: {network: internet, allow_hosts: [PyPI.org]}}", r"pools\.default\.allow_hosts: 'PyPI\.org' must be the full name of a host in"),
        ("pools: {default: {network: internet, allow_hosts: ['2001:db8::/32']}}", r"pools\.default\.allow_hosts: .* \(slots have no IPv6\)"),
        ("pools: {default: {network: internet, allow_private: [10.0.0.1/8]}}", r"pools\.default\.allow_private: '10\.0\.0\.1/8' must be an IPv4 address or"),
        ("pools: {default: {root: overlay}}", r"pools\.default\.root: overlay is reserved"),
        ("pools: {default: {dedicated: true}}", r"pools\.default\.dedicated: not possible on the local backend"),
        ("pools: {default: {local: {expose: [opt]}}}", r"pools\.default\.local\.expose: must be absolute"),
        ("pools: {default: {env_vars: {'': x}}}", r"pools\.default\.env_vars"),
        ("pools: {Default: {}}", r"pools"),
        ("pools: {a: {}, b: {}}\nlimits: {pools: 1}", r"pools: 2 are more than the 1 of `limits.pools`"),
        ("pools: {default: {slot_disk_mb: 0}}", r"pools\.default\.slot_disk_mb: should be greater than or equal to 1"),
        ("pools: {default: {max_sandboxes: 1001}}", r"pools\.default\.max_sandboxes: more than 1000 sandboxes.*limits.pool_sandboxes"),
        ("pools: {default: {workspace_base: data}}", r"pools\.default\.workspace_base: must be an absolute path"),
        ("pools: {default: {cpu: .nan}}", r"pools\.default\.cpu: should be a finite number"),
        ("pools: {default: {}, default: {}}", r"is not YAML: .*'default' is there twice at line 1, column 22: "),
        ("pools: {a: \0}", r"is not YAML: .*not allowed at position 11"),
        ("limits: {lease_calls: 100001}", r"limits\.lease_calls: should be less than or equal to 100000"),
        ("limits: {lease_calls: many}", r"limits\.lease_calls: should be a valid integer"),
        ("nomad: {ca_cert: /nowhere.pem}", r"nomad\.ca_cert: /nowhere.pem cannot be read: No such file"),
        ("pools: {a: {}}\ndefault_pool: b", r"default_pool: there is no pool 'b'; there are a"),
        ("pools: {a: {}}", r"default_pool: there is no pool 'default'; there are a"),
        ("pool: {}", r"pool: unknown key; allowed are pools, default_pool, claim_after_s, tenants, limits, nomad"),
        ("limits: {batch_call: 1}", r"limits\.batch_call: unknown key; allowed are body_bytes"),
        ("limits: {batch_calls: 0}", r"limits\.batch_calls"),
        ("tenants: [{name: a}]", r"tenants\.0: a needs token or token_file"),
        ("tenants: [{name: a, token: t, token_file: f}]", r"tenants\.0: a needs token or token_file"),
        ("tenants: [{name: a, token_file: /nowhere}]", r"tenants\.0\.token_file: /nowhere cannot be read"),
        ("tenants: [{name: a, token: t, max_leases: -1}]", r"tenants\.0\.max_leases: should be greater than or equal to 0"),
        ("tenants: [{name: a, token: t, max_waiters: many}]", r"tenants\.0\.max_waiters: should be a valid integer"),
        ("tenants: [{name: a, token: t, max_running_calls: 0}]", r"tenants\.0\.max_running_calls: should be greater than or equal to 1"),
        ("tenants: [{name: a, tokn: t}]", r"tenants\.0\.tokn: unknown key; allowed are name, token"),
        ("nomad: {tokenfile: x}", r"nomad\.tokenfile: unknown key; allowed are token_file"),
        ("- a list", r"must be a mapping"),
        ("pools: {default: [", r"is not YAML"),
        ("a: !!python/object/apply:os.getcwd []", r"is not YAML"),
    ],
)
def test_a_file_that_cannot_be_stops_the_start(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(SettingsError) as caught:
        with_file(tmp_path, text)

    assert str(caught.value).startswith(f"settings file {tmp_path / 'pools.yaml'}: ")
    assert re.search(named, str(caught.value))
    assert "\n" not in str(caught.value)


def test_every_setting_says_where_it_came_from(tmp_path: Path) -> None:
    text = "pools: {default: {min_sandboxes: 0, local: {expose: [/opt]}}}\nlimits: {pools: 3}\ntenants: [{name: a, token: b}]"
    settings = with_file(tmp_path, text, SANDBOX_LOG_LEVEL="debug", SANDBOX_TOKENS="c:d")
    file = f"file, {tmp_path / 'pools.yaml'}"

    assert settings.source("pools.default.min_sandboxes") == settings.source("pools.default.local.expose") == settings.source("limits.pools") == file
    assert settings.source("log_level") == "environment, SANDBOX_LOG_LEVEL"
    assert settings.source("tenants") == f"environment, SANDBOX_TOKENS, and {file}"
    assert {settings.source(name) for name in ("log_format", "pools.default.max_sandboxes", "limits.body_bytes", "state_dir")} == {"default"}


def test_a_pool_that_nobody_wrote_down_is_built_in(tmp_path: Path) -> None:
    assert load_settings({}).pools_are_built_in
    assert with_file(tmp_path, "limits: {pools: 3}").pools_are_built_in
    assert not with_file(tmp_path, "pools: {default: {}}").pools_are_built_in
    assert not with_file(tmp_path, "pools: {}").pools_are_built_in


def test_a_tenant_may_have_limits(tmp_path: Path) -> None:
    (limited, free) = with_file(
        tmp_path, "tenants: [{name: a, token: t, max_leases: 3, max_waiters: 1, max_running_calls: 1, weight: 2}, {name: b, token: u}]"
    ).tenants

    assert limited == Tenant(name="a", token="t", max_leases=3, max_waiters=1, max_running_calls=1, weight=2)
    assert free == Tenant(name="b", token="u")


def test_the_variables_and_keys_are_the_contracts(tmp_path: Path) -> None:
    told = CONTRACT["settings"]

    assert ["SANDBOX_" + name for name in EnvironmentModel.model_fields] == told["environment"]
    assert set(told["left_alone"]) == CLIENTS_OWN
    assert list(SettingsFile.model_fields) == told["file"]
    assert list(TenantModel.model_fields) == told["tenant"]
    assert set(told["nomad"]) <= set(NomadModel.model_fields)


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    assert with_file(tmp_path, "").pools == {"default": PoolSpec(shared=True)}


def test_the_state_folder_is_roots_or_the_users() -> None:
    assert default_state_dir({"XDG_STATE_HOME": "/x"}, 0) == Path("/var/lib/sandbox-pool")
    assert default_state_dir({"XDG_STATE_HOME": "/x"}, 1000) == Path("/x/sandbox-pool")
    assert default_state_dir({"HOME": "/home/u"}, 1000) == Path("/home/u/.local/state/sandbox-pool")


def test_the_spec_over_http_and_the_spec_inside_have_the_same_fields_and_defaults() -> None:
    assert spec_of(PoolSpecBody()) == PoolSpec()
    assert list(PoolSpecBody.model_fields) == [field.name for field in dataclasses.fields(PoolSpec)]


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"Is a directory"):
        load_settings({"SANDBOX_CONFIG": str(tmp_path)})


def test_the_settings_of_a_backend_reach_the_place_where_it_is_made(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    path = tmp_path / "config.yaml"
    path.write_text(f"nomad: {{token_file: {token}}}\ndocker: {{host: 'unix:///run/docker.sock'}}\n")
    settings = load_settings({"SANDBOX_CONFIG": str(path)})

    assert settings.of_backend("nomad") == {"token_file": token, "ca_cert": None, "client_cert": None, "client_key": None}
    assert settings.of_backend("docker") == {"host": "unix:///run/docker.sock"}
    assert settings.of_backend("local") == {"transport": "unix"}
    for name in ("nomad", "docker"):
        with pytest.raises(NotImplementedHere, match="is not built yet"):
            load_backend(name, tmp_path, settings=settings.of_backend(name))
