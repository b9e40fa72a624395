"""The commands that look at the settings and end."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from sandbox_server.__main__ import main


@pytest.fixture(autouse=True)
def _state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDBOX_STATE_DIR", str(tmp_path / "state"))


def test_check_config_says_that_all_is_well_and_makes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-config"]) == 0

    assert "good" in capsys.readouterr().out
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("command", ["check-config", "print-config", "serve"])
def test_settings_that_cannot_be_are_one_line(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SANDBOX_STATE", "/x")

    assert main([command]) == 2

    told = capsys.readouterr().err
    assert "SANDBOX_STATE: unknown" in told
    assert told.count("\n") == 1


@pytest.mark.parametrize("backend", ["docker", "nomad", "modal"])
def test_a_backend_that_is_not_built_is_refused_by_pool(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "pools.yaml"
    config.write_text(f"pools: {{far: {{backend: {backend}}}, default: {{}}}}")
    monkeypatch.setenv("SANDBOX_CONFIG", str(config))

    assert main(["check-config"]) == 2

    told = capsys.readouterr().err
    assert f"{config}: pools.far.backend: " in told
    assert told.count("\n") == 1


def test_every_pool_whose_backend_is_not_available_has_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "pools.yaml"
    config.write_text("pools: {far: {backend: nomad}, default: {}, cloud: {backend: modal}}")
    monkeypatch.setenv("SANDBOX_CONFIG", str(config))

    assert main(["check-config"]) == 2

    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(": backend ")[0] for line in lines] == [f"settings file {config}: pools.{name}.backend" for name in ("far", "cloud")]


def test_print_config_shows_every_setting_and_no_token(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SANDBOX_TOKENS", "trainer:topsecret")

    assert main(["print-config"]) == 0

    told = capsys.readouterr().out
    shown = yaml.safe_load(told)
    assert "topsecret" not in told
    assert shown["pools"]["default"]["slots_per_sandbox"] == 10
    assert shown["tenants"][0]["name"] == "trainer"
    assert shown["limits"]["batch_calls"] == 1000
    assert "  batch_calls: 1000  # default" in told.splitlines()
    assert any(line.startswith("tenants: ") and line.endswith("# environment, SANDBOX_TOKENS") for line in told.splitlines())
    assert any(line.startswith("state_dir: ") and line.endswith("# environment, SANDBOX_STATE_DIR") for line in told.splitlines())


def test_a_folder_that_holds_something_is_not_for_a_service_that_removes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "state.db").write_text("precious")
    monkeypatch.setenv("SANDBOX_STATE_DIR", str(tmp_path))

    assert main(["serve", "--port", "0", "--ephemeral"]) == 2

    assert f"state folder {tmp_path}: --ephemeral removes it at the end, and it is not empty" in capsys.readouterr().err
    assert (tmp_path / "state.db").read_text() == "precious"


def test_a_state_folder_that_cannot_be_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SANDBOX_STATE_DIR", str(tmp_path / "file"))

    assert main(["serve", "--port", "0"]) == 2

    assert capsys.readouterr().err.count("\n") == 1
