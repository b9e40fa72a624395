"""State that is deleted, replaced or locked anew under a running service, as its callers and whoever starts a second one see it."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import httpx

from tests.contract.lifetime.test_end import acquire, uvicorn_on

NOTICED_WITHIN_S = 15.0
"""It looks every second; the machine may be loaded."""


def storage_once(http: httpx.Client, ready: bool) -> dict[str, Any]:
    """What `/readyz` says of the storage, as soon as that is ready or not."""
    deadline = time.monotonic() + NOTICED_WITHIN_S
    while (answer := http.get("/readyz")).json()["storage"]["ready"] != ready:
        assert time.monotonic() < deadline, answer.text
        time.sleep(0.02)  # readiness has no event to wait for
    assert (answer.status_code == 200) == ready
    storage: dict[str, Any] = answer.json()["storage"]
    return storage


def test_a_deleted_state_file_loses_nothing_that_was_answered(tmp_path: Path) -> None:
    state_dir = tmp_path / "state"
    with uvicorn_on(state_dir) as first, first.http() as http:
        before = acquire(http)
        for name in ("state.db", "state.db-wal", "state.db-shm"):
            (state_dir / name).unlink()
        after = acquire(http)
        assert (state_dir / "state.db").stat().st_size > 0
        first.popen.send_signal(signal.SIGKILL)
        first.popen.wait()

    with uvicorn_on(state_dir) as second, second.http() as http:
        # Its agents ended with it: their leases are known, and lost (410) as soon as the service has found that out, never unknown (404).
        deadline = time.monotonic() + NOTICED_WITHIN_S
        for lease_id in (before, after):
            while (status := http.get(f"/v1/leases/{lease_id}").status_code) == 200:
                assert time.monotonic() < deadline, f"lease {lease_id} is not lost"
            assert status == 410


def test_a_replaced_state_file_is_said_until_it_is_moved_away(tmp_path: Path) -> None:
    state_dir = tmp_path / "state"
    with uvicorn_on(state_dir) as process, process.http() as http:
        lease_id = acquire(http)
        (tmp_path / "another").write_bytes(b"another")
        (tmp_path / "another").replace(state_dir / "state.db")

        said = storage_once(http, ready=False)["last_error"]
        refused = http.post("/v1/acquire", json={})
        released = http.post("/v1/release", json={"lease_ids": [lease_id]})
        assert "move that file away" in said
        assert (refused.status_code, refused.json()["code"], refused.json()["detail"]) == (503, "storage_unavailable", said)
        assert released.json()["released"] == [lease_id]
        assert (state_dir / "state.db").read_bytes() == b"another"

        (state_dir / "state.db").unlink()
        assert storage_once(http, ready=True)["last_error"] is None
        acquire(http)


def test_a_deleted_lock_file_lets_no_second_service_in(tmp_path: Path) -> None:
    state_dir = tmp_path / "state"
    with uvicorn_on(state_dir) as first:
        (state_dir / "lock").unlink()
        with uvicorn_on(state_dir) as second:
            assert second.popen.wait(20) == 3
        assert any("another service" in line for line in second.said)
        assert first.popen.poll() is None
