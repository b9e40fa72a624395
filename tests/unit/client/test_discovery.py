"""Tests of finding the service."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from env_client.discovery import Endpoint, find_service, local_service, state_dirs
from env_client.errors import ServiceNotFound


def a_service(state_dir: Path, url: str = "http://127.0.0.1:8700", token: str | None = "local-token") -> Path:
    state_dir.mkdir(parents=True, exist_ok=True)
    (state_dir / "server.json").write_text(json.dumps({"url": url, "pid": 1}))
    if token is not None:
        (state_dir / "token").write_text(token + "\n")
    return state_dir


def test_a_service_that_was_killed_is_not_found(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    (tmp_path / "server.json").write_text(json.dumps({"url": "http://127.0.0.1:8700", "pid": gone.pid}))

    assert local_service({"SANDBOX_STATE_DIR": str(tmp_path)}) is None
    with pytest.raises(ServiceNotFound):
        find_service(environ={"SANDBOX_STATE_DIR": str(tmp_path)})


def test_an_endpoint_names_its_source(tmp_path: Path) -> None:
    here = {"SANDBOX_STATE_DIR": str(a_service(tmp_path))}

    assert find_service("http://arg", environ=here).source == "the caller"
    assert find_service(environ={"SANDBOX_URL": "http://env"}).source == "SANDBOX_URL"
    assert find_service(environ=here).source == str(tmp_path / "server.json")


def test_arguments_take_precedence_over_the_environment(tmp_path: Path) -> None:
    environ = {"SANDBOX_URL": "http://env", "SANDBOX_TOKEN": "env-token", "SANDBOX_STATE_DIR": str(a_service(tmp_path))}

    assert find_service("http://arg/", "arg-token", environ=environ) == Endpoint("http://arg", "arg-token")
    assert find_service(environ=environ) == Endpoint("http://env", "env-token")


def test_the_token_of_this_machine_is_not_sent_elsewhere(tmp_path: Path) -> None:
    environ = {"SANDBOX_URL": "http://elsewhere", "SANDBOX_STATE_DIR": str(a_service(tmp_path))}

    assert find_service(environ=environ) == Endpoint("http://elsewhere", None)


def test_an_address_of_this_machine_s_service_brings_its_token(tmp_path: Path) -> None:
    environ = {"SANDBOX_URL": "http://127.0.0.1:8700/", "SANDBOX_STATE_DIR": str(a_service(tmp_path))}

    assert find_service(environ=environ) == Endpoint("http://127.0.0.1:8700", "local-token")


def test_the_service_of_this_machine_is_found_in_its_state_folder(tmp_path: Path) -> None:
    environ = {"SANDBOX_STATE_DIR": str(a_service(tmp_path))}

    assert find_service(environ=environ) == Endpoint("http://127.0.0.1:8700", "local-token")
    assert find_service(environ={**environ, "SANDBOX_TOKEN": "mine"}).token == "mine"


def test_a_service_without_a_token_file_has_its_tokens_elsewhere(tmp_path: Path) -> None:
    assert find_service(environ={"SANDBOX_STATE_DIR": str(a_service(tmp_path, token=None))}).token is None


@pytest.mark.parametrize(("uid", "first"), [(1000, "user"), (0, "root")])
def test_the_service_of_the_same_user_takes_precedence(tmp_path: Path, uid: int, first: str) -> None:
    a_service(tmp_path / "state/sandbox-pool", "http://user")
    a_service(tmp_path / "root", "http://root")

    found = find_service(environ={"XDG_STATE_HOME": str(tmp_path / "state")}, uid=uid, root_dir=tmp_path / "root")

    assert found.url == f"http://{first}"


def test_the_state_folders_that_are_searched(tmp_path: Path) -> None:
    assert state_dirs({"HOME": "/home/me"}, 1000) == [Path("/home/me/.local/state/sandbox-pool"), Path("/var/lib/sandbox-pool")]
    assert state_dirs({"HOME": "/home/me", "SANDBOX_STATE_DIR": "/x"}, 0) == [Path("/x")]


def test_a_missing_service_is_reported_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ServiceNotFound) as caught:
        find_service(environ={"SANDBOX_STATE_DIR": str(tmp_path)})

    assert caught.value.detail == (
        "no sandbox service is known: set SANDBOX_URL (and SANDBOX_TOKEN), or start one on this machine with "
        f"`python -m sandbox_server serve` (looked for server.json in {tmp_path})"
    )


@pytest.mark.parametrize("content", ["", "{}", "[]", "not json"])
def test_a_broken_server_json_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "server.json").write_text(content)

    with pytest.raises(ServiceNotFound, match=r"server\.json does not say where"):
        find_service(environ={"SANDBOX_STATE_DIR": str(tmp_path)})


def test_an_unreadable_token_is_named(tmp_path: Path) -> None:
    a_service(tmp_path, token=None)
    (tmp_path / "token").mkdir()

    with pytest.raises(ServiceNotFound, match=r"token .* cannot be read .*set SANDBOX_TOKEN"):
        find_service(environ={"SANDBOX_STATE_DIR": str(tmp_path)})


def test_an_address_needs_a_scheme() -> None:
    with pytest.raises(ServiceNotFound, match="must start with http"):
        find_service("localhost:8700", environ={})
