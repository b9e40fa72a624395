"""Tests of pool specs: setting fields, and describing changes."""

from __future__ import annotations

import pytest

from env_client.cli.failures import Failure
from env_client.cli.specs import apply_changes, describe_changes, unknown_field_failure

SPEC = {"max_sandboxes": 2, "idle_timeout_s": 120.0, "env_vars": {}, "nomad": {"address": "a", "driver": "docker"}, "local": {"expose": []}}


def test_fields_are_set_and_the_spec_itself_stays() -> None:
    changed = apply_changes(SPEC, ["max_sandboxes=3", "nomad.driver=podman", 'local.expose=["/opt"]', "env_vars.A=b=c"])

    assert changed == {**SPEC, "max_sandboxes": 3, "nomad": {"address": "a", "driver": "podman"}, "local": {"expose": ["/opt"]}, "env_vars": {"A": "b=c"}}
    assert SPEC["nomad"] == {"address": "a", "driver": "docker"}


@pytest.mark.parametrize(
    ("change", "variables"),
    [
        ("env_vars.N=5", {"N": "5"}),
        ("env_vars.N=true", {"N": "true"}),
        ("env_vars.N=1e400", {"N": "1e400"}),
        ('env_vars.N="5"', {"N": "5"}),
        ("env_vars.a.b=c", {"a.b": "c"}),
        ('env_vars={"N": 5, "T": true, "S": "s"}', {"N": "5", "T": "true", "S": "s"}),
    ],
)
def test_a_variable_is_text_whatever_it_looks_like(change: str, variables: dict[str, str]) -> None:
    assert apply_changes(SPEC, [change])["env_vars"] == variables


@pytest.mark.parametrize("number", ["1e400", "-1e400", "NaN", "Infinity"])
def test_a_number_that_is_not_finite_says_so(number: str) -> None:
    with pytest.raises(Failure, match=f"--set idle_timeout_s={number}: .* is not a finite number"):
        apply_changes(SPEC, [f"idle_timeout_s={number}"])


@pytest.mark.parametrize("change", ["x", "=1", ".a=1", "a.=1", "max_sandboxes.a=1"])
def test_what_sets_nothing_is_refused(change: str) -> None:
    with pytest.raises(Failure, match="--set"):
        apply_changes(SPEC, [change])


def test_changes_are_described_without_values_that_may_be_secret() -> None:
    after = apply_changes(SPEC, ["max_sandboxes=3", "idle_timeout_s=0.5", "nomad.driver=podman", "env_vars.TOKEN=secret", 'local.expose=["/opt"]'])

    assert describe_changes(SPEC, after) == {
        "max_sandboxes": "2 → 3",
        "idle_timeout_s": "120 → 0.5",
        "nomad.driver": '"docker" → "podman"',
        "env_vars": "",
        "local.expose": "",
    }
    assert describe_changes(SPEC, SPEC) == {}


@pytest.mark.parametrize(
    ("field", "next_step"),
    [
        ("max_sandbox", "did you mean max_sandboxes?"),
        ("nomad.adress", "did you mean nomad.address?"),
        ("nomad.zzz", "there are nomad.address, nomad.driver"),
        ("zzz", "there are max_sandboxes, idle_timeout_s, env_vars, nomad, local"),
    ],
)
def test_a_field_that_is_none_has_its_nearest_named(field: str, next_step: str) -> None:
    failure = unknown_field_failure(field, SPEC)

    assert failure is not None
    assert (failure.sentence, failure.next_step) == (f"a pool spec has no field {field!r}", next_step)


@pytest.mark.parametrize("field", ["max_sandboxes", "nomad.driver", "max_sandboxes.x", "env_vars.N", ""])
def test_a_field_that_there_is_has_something_else_wrong(field: str) -> None:
    assert unknown_field_failure(field, SPEC) is None


def test_where_no_pool_shows_the_fields_none_are_named() -> None:
    assert unknown_field_failure("zzz", {}) is None
