"""Tests of creating, changing, showing and deleting pools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.cli.sandbox_command import SandboxCommand

SMALL = ("-s", "slots_per_sandbox=1", "-s", "max_sandboxes=1", "-s", "min_sandboxes=0", "-s", "on_shutdown=destroy")


@pytest.fixture
def pool(sandbox: SandboxCommand) -> Iterator[str]:
    """A pool without a sandbox, which is deleted after the test."""
    assert sandbox.out("pool", "apply", "walk", *SMALL) == "created pool walk\n"
    yield "walk"
    sandbox("pool", "delete", "walk", "--force")


class TestApply:
    def test_set_changes_a_field_and_leaves_the_rest(self, sandbox: SandboxCommand, pool: str) -> None:
        before = sandbox.json("pools", pool)["spec"]

        assert sandbox.out("pool", "apply", pool, "-s", "acquire_timeout_s=5") == "changed pool walk: acquire_timeout_s 60 → 5\n"
        assert sandbox.json("pools", pool)["spec"] == {**before, "acquire_timeout_s": 5}

    def test_what_is_so_already_is_unchanged(self, sandbox: SandboxCommand, pool: str, tmp_path: Path) -> None:
        (tmp_path / "same.json").write_text(json.dumps(sandbox.json("pools", pool)))

        assert sandbox.out("pool", "apply", pool, "same.json") == "unchanged pool walk\n"
        assert sandbox.out("pool", "apply", pool, "-s", "max_sandboxes=1") == "unchanged pool walk\n"
        document = json.loads(sandbox.out("pool", "apply", "--json", pool, "-s", "max_sandboxes=1"))
        assert (document["created"], document["changed"], document["pool"]["name"]) == (False, [], pool)

    def test_a_variable_is_text(self, sandbox: SandboxCommand, pool: str) -> None:
        sandbox.out("pool", "apply", pool, "-s", "env_vars.N=5", "-s", "env_vars.T=true")

        assert sandbox.json("pools", pool)["spec"]["env_vars"] == {"N": "5", "T": "true"}

    def test_a_variable_of_a_file_that_is_no_text_says_so(self, sandbox: SandboxCommand, pool: str, tmp_path: Path) -> None:
        (tmp_path / "p.yaml").write_text("env_vars: {N: 5}\n")
        done = sandbox("pool", "apply", pool, "p.yaml")

        assert done.returncode == 125
        assert done.stderr.startswith(b"sandbox: env_vars.N: should be ")

    def test_a_state_is_in_the_words_of_the_api(self, sandbox: SandboxCommand, pool: str) -> None:
        told = sandbox.json("pools", pool)["state"]

        assert told in sandbox.out("pools", pool).splitlines()[1].split()
        assert sandbox.out("pools").splitlines()[1].split()[-1] == "ready"

    def test_a_file_is_the_whole_spec(self, sandbox: SandboxCommand, pool: str, tmp_path: Path) -> None:
        (tmp_path / "p.yaml").write_text("slots_per_sandbox: 1\nmin_sandboxes: 0\non_shutdown: destroy\n")

        assert sandbox.out("pool", "apply", pool, "p.yaml", "-s", "idle_timeout_s=7") == "changed pool walk: max_sandboxes 1 → 5, idle_timeout_s 120 → 7\n"

    def test_without_anything_to_apply_a_pool_that_is_there_stays(self, sandbox: SandboxCommand, pool: str) -> None:
        before = sandbox.json("pools", pool)["spec"]
        done = sandbox("pool", "apply", pool)

        assert (done.returncode, done.stdout) == (125, b"")
        assert done.stderr.decode() == "sandbox: pool 'walk' exists, and no change is given\n  give a FILE, --set FIELD=VALUE, or --defaults\n"
        assert sandbox.json("pools", pool)["spec"] == before

    def test_the_option_defaults_resets_all_fields(self, sandbox: SandboxCommand, pool: str) -> None:
        told = sandbox.out("pool", "apply", pool, "--defaults", "-s", "slots_per_sandbox=1", "-s", "min_sandboxes=0")

        assert told == 'changed pool walk: max_sandboxes 1 → 5, on_shutdown "destroy" → "keep"\n'
        both = sandbox("pool", "apply", pool, "-", "--defaults")
        assert (both.returncode, both.stderr.decode()) == (125, "sandbox: FILE and --defaults exclude each other\n  give one of them\n")

    def test_a_new_pool_needs_no_options(self, sandbox: SandboxCommand) -> None:
        assert sandbox.out("pool", "apply", "plain") == "created pool plain\n"
        sandbox.out("pool", "delete", "plain", "--force")

    @pytest.mark.parametrize(
        ("change", "told"),
        [
            ("slot_per_sandbox=3", "sandbox: a pool spec has no field 'slot_per_sandbox'\n  did you mean slots_per_sandbox?\n"),
            ("nomad.adress=x", "sandbox: a pool spec has no field 'nomad.adress'\n  did you mean nomad.address?\n"),
            (
                "idle_timeout_s=1e400",
                "sandbox: --set idle_timeout_s=1e400: 1e400 is not a finite number\n  give a finite number; some fields accept null for no limit\n",
            ),
            (
                "max_sandboxes=many",
                "sandbox: max_sandboxes: should be a valid integer\n  `sandbox pools NAME` shows every field of a spec; docs/settings.md describes them\n",
            ),
        ],
    )
    def test_an_unknown_field_or_a_wrong_value_is_refused(self, sandbox: SandboxCommand, change: str, told: str) -> None:
        done = sandbox("pool", "apply", "never", "--set", change)

        assert (done.returncode, done.stderr.decode()) == (125, told)

    def test_a_pool_of_the_settings_file_says_where_it_is_changed(self, sandbox: SandboxCommand) -> None:
        done = sandbox("pool", "apply", "default", "-s", "max_sandboxes=7")

        assert done.returncode == 125
        assert done.stderr.decode().startswith("sandbox: pool 'default' is of the settings file: change it there, and start the service again\n")


def test_a_deleted_pool_is_shown_as_draining(sandbox: SandboxCommand) -> None:
    sandbox.out("pool", "apply", "going", "-s", "slots_per_sandbox=2", "-s", "max_sandboxes=1", "-s", "on_shutdown=destroy")
    lease = sandbox.out("acquire", "-p", "going", "--wait", "30").strip()
    sandbox.out("pool", "delete", "going")

    (row,) = [line for line in sandbox.out("pools").splitlines() if line.startswith("going")]
    assert "draining: the pool was deleted" in row
    assert "draining: the pool was deleted" in sandbox.out("pools", "going")
    doctor = sandbox("doctor", "--json")
    (finding,) = [one for one in json.loads(doctor.stdout)["pool going"] if one["name"] == "state"]
    assert (doctor.returncode, finding["state"]) == (0, "limited")
    assert finding["detail"].startswith("draining: the pool was deleted")
    sandbox.out("release", lease)


def test_a_pool_without_a_sandbox_says_how_to_get_one_to_verify(sandbox: SandboxCommand, pool: str) -> None:
    done = sandbox("pool", "verify", pool)

    assert (done.returncode, done.stderr.decode()) == (
        125,
        "sandbox: pool 'walk' has no sandbox now, so there is no slot to verify\n"
        "  an acquire starts one: `sandbox run --pool walk -- true`, then verify again\n",
    )


def test_an_admin_names_the_tenant_whose_pool_is_meant(sandbox: SandboxCommand, pool: str) -> None:
    heads, *rows = sandbox.out("pools", "--tenant", "*").splitlines()
    mine = sandbox.out("pools", pool, "--tenant", "local")
    done = sandbox("pool", "delete", pool, "--tenant", "nobody")

    assert heads.split()[:2] == ["POOL", "TENANT"]
    assert [row.split()[1] for row in rows if row.startswith(pool)] == ["local"]
    assert mine == sandbox.out("pools", pool)
    assert (done.returncode, done.stderr.decode().splitlines()[0]) == (125, "sandbox: tenant 'nobody' has no pool 'walk'")
