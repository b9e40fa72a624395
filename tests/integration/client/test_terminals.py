"""The terminal of a lease through both clients, over the real service."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from env_client.errors import FileNotFound, InvalidRequest
from tests.support.both_clients import KINDS, client_of
from tests.support.service import Service


@pytest.mark.parametrize("kind", KINDS)
def test_keys_go_in_and_the_screen_and_the_recording_come_out(service: Service, tmp_path: Path, kind: str) -> None:
    with client_of(kind, service.url, service.token) as client, client.lease(wait_s=30) as lease:
        with pytest.raises(FileNotFound, match="has no recording"):
            lease.get_recording()
        typed = lease.send_keys(["echo a''b", "Enter"], block=True)
        new = lease.send_keys("x", args={"min_wait_s": 0.2, "capture_incremental": True})
        screen = lease.capture_screen(entire=True)
        recording = lease.get_recording(typed.metadata["recording"])
        size_bytes = lease.get_recording_to(tmp_path / "session.cast")
        with pytest.raises(InvalidRequest, match="keys"):
            lease.send_keys([1])

    assert (typed.success, typed.metadata["settled"], "\nab\n" in typed.output) == (True, True, True)
    assert (new.metadata["captured"], new.output.count("\n")) == ("incremental", 1)
    assert screen.output.endswith(new.output)
    assert json.loads(recording.splitlines()[0])["version"] == 2
    assert (tmp_path / "session.cast").read_bytes()[:size_bytes].startswith(recording)
