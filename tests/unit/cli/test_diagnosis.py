"""Tests of the findings of `doctor` about a pool's capabilities."""

from __future__ import annotations

from typing import Any

import pytest

from env_client.cli.diagnosis import Finding, FindingState, draining_reason, pool_findings, reasons_by_backend
from env_client.values import PoolInfo

ALL = {
    "modes": {"bwrap": "ok", "uid": "ok", "none": "not allowed"},
    "network": ["none", "shared"],
    "limits": {"memory": "cgroup2", "processes": "cgroup2"},
    "proves": ["oom"],
    "tools": ["bash"],
}


def found(isolation: str | None = "bwrap", last_error: str | None = None, **changed: Any) -> dict[str, Finding]:
    pool = PoolInfo(name="p", isolation=isolation, capabilities={**ALL, **changed} if isolation else {}, last_error=last_error)
    return {finding.name: finding for finding in pool_findings(pool)}


def test_where_all_is_well_nothing_is_to_be_mended() -> None:
    assert {finding.state for finding in found().values()} == {FindingState.OK, FindingState.OFF}
    assert not [finding.fix for finding in found().values() if finding.fix]


@pytest.mark.parametrize(
    ("verdict", "fix"),
    [
        ("bubblewrap (bwrap) is not in PATH", "bubblewrap"),
        ("bwrap: setting up uid map: Permission denied", "let ordinary users create user namespaces"),
        ("bwrap: No permissions to create new namespace: Operation not permitted", "--security-opt seccomp=unconfined"),
    ],
)
def test_a_mode_that_does_not_work_says_how_to_get_it(verdict: str, fix: str) -> None:
    finding = found("uid", modes={"bwrap": verdict, "uid": "ok"})["mode bwrap"]

    assert (finding.state, finding.detail) == (FindingState.LIMITED, verdict)
    assert fix in finding.fix


def test_a_weaker_mode_that_does_not_work_is_only_off() -> None:
    finding = found("bwrap", modes={"bwrap": "ok", "uid": "needs root, to give every slot a user of its own"})["mode uid"]

    assert (finding.state, finding.fix) == (FindingState.OFF, "run the service as root")


def test_missing_isolation_is_reported_in_capitals() -> None:
    assert "NOT isolated" in found("none")["isolation"].detail


@pytest.mark.parametrize(("how", "state"), [("cgroup1", FindingState.OK), ("rlimit", FindingState.LIMITED), ("none", FindingState.LIMITED)])
def test_the_state_of_a_limit(how: str, state: FindingState) -> None:
    assert found(limits={"memory": how})["memory limit"].state is state


def test_a_pool_that_cannot_start_is_missing_what_slots_need() -> None:
    findings = found(None, last_error="no isolation mode works here")

    assert (findings["isolation"].state, findings["last error"].state) == (FindingState.MISSING, FindingState.MISSING)


def test_a_network_that_cannot_be_switched_off_is_reported() -> None:
    assert found("uid", network=["shared"])["network"].state is FindingState.LIMITED


@pytest.mark.parametrize("isolation", ["bwrap", None])
def test_a_pool_that_drains_is_no_fault_and_says_why(isolation: str | None) -> None:
    pool = PoolInfo(name="p", state="draining", isolation=isolation, capabilities=ALL if isolation else {}, last_error="the pool was deleted")
    findings = {finding.name: finding for finding in pool_findings(pool)}

    assert (findings["state"].state, findings["state"].detail) == (FindingState.LIMITED, "draining: the pool was deleted")
    assert not [finding for finding in findings.values() if finding.state is FindingState.MISSING]
    assert "last error" not in findings


def test_a_service_that_does_not_say_how_a_pool_stands_is_an_older_one() -> None:
    assert draining_reason(PoolInfo(name="p", last_error="no isolation mode works here")) == ""
    assert "state" not in found()
    assert draining_reason(PoolInfo(name="p", state="draining")) == "draining: it gives no new leases, and is deleted when its last lease ends"


def test_a_backend_is_available_unless_a_line_of_the_check_names_its_pool() -> None:
    lines = [f"settings file /p: pools.{name}.backend: backend {name!r} is not built yet" for name in ("docker", "modal")]

    reasons = reasons_by_backend(lines)

    assert reasons == {"local": None, "docker": "backend 'docker' is not built yet", "nomad": None, "modal": "backend 'modal' is not built yet"}


def test_a_check_that_fails_before_the_backends_is_the_reason_of_all_of_them() -> None:
    reasons = reasons_by_backend(["Traceback (most recent call last):", "ModuleNotFoundError: No module named 'pydantic'"])

    assert set(reasons) == {"local", "docker", "nomad", "modal"}
    assert set(reasons.values()) == {"ModuleNotFoundError: No module named 'pydantic'"}


@pytest.mark.parametrize(
    ("network", "probed", "state", "text"),
    [
        (["none", "internet"], "ok", FindingState.OK, "each slot has a network of its own"),
        (["none", "shared"], "ok", FindingState.OFF, "network: internet"),
        (["none", "shared"], "the program pasta is not in PATH (on Debian, the package passt)", FindingState.OFF, "passt"),
        (["none", "shared"], "slots are not forked from a template here", FindingState.OFF, "not forked"),
    ],
)
def test_networks_of_slots_of_their_own_are_recommended_where_nothing_is_missing(network: list[str], probed: str, state: FindingState, text: str) -> None:
    finding = found(network=network, internet=probed)["internet"]

    assert finding.state is state
    assert text in f"{finding.detail} {finding.fix}"
