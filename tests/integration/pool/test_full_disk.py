"""A slot fills the disk of the state folder, and the service is killed: the next one starts, releases, frees the room, and works in full again."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from tests.support.service import Service, clean_environ, end_sandboxes_left, listening_url, short_folder, start_serve

POOL = {"slots_per_sandbox": 2, "min_sandboxes": 1, "max_sandboxes": 1, "max_file_mb": 1024}
FILL = "head -c 1G /dev/zero > fill; sleep 1000 & df . | tail -1"
WITHIN_S = 40.0

pytestmark = [pytest.mark.privileged, pytest.mark.timeout(180)]


@pytest.fixture
def disk() -> Iterator[Path]:
    """A folder with a small file system of its own."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a small file system")
    with short_folder() as folder:
        place = folder / "disk"
        place.mkdir()
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96m,mode=711", "tmpfs", place], capture_output=True, check=False).returncode:
            pytest.skip("no file system can be mounted here")
        try:
            yield place
        finally:
            end_sandboxes_left(place / "state")
            subprocess.run(["umount", "-l", place], check=True)


@contextlib.contextmanager
def life(disk: Path, name: str) -> Iterator[Service]:
    """One life of a service whose state is on this disk; it ends with SIGKILL, unless it was stopped before."""
    config, log_path = disk.parent / "config.yaml", disk.parent / f"{name}.log"
    config.write_text(yaml.safe_dump({"pools": {"default": POOL}}))
    environ = clean_environ({"SANDBOX_CONFIG": str(config), "SANDBOX_STATE_DIR": str(disk / "state")})
    read_end, write_end = os.pipe()
    # Its standard output is on the full disk too, as with `serve > printed.txt` beside the state folder.
    with log_path.open("wb") as log, (disk / f"{name}.out").open("wb") as out, open(read_end, "rb") as ready:
        process = start_serve(["--port", "0"], environ, log, write_end, stdout=out)
        os.close(write_end)
        service = Service(url="", state_dir=disk / "state", process=process, log_path=log_path)
        try:
            service.url = listening_url(service, ready)
            yield service
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
            if sys.exc_info()[0] is not None:
                print(service.log, file=sys.stderr)


def acquire(http: httpx.Client) -> str:
    """A lease, as soon as there is one."""
    deadline = time.monotonic() + WITHIN_S
    while (answer := http.post("/v1/acquire", json={"wait_s": 20, "ttl_s": 600})).status_code != 200:
        assert answer.status_code == 503, answer.text
        assert time.monotonic() < deadline, answer.text
        time.sleep(0.1)
    lease_id: str = answer.json()["leases"][0]["lease_id"]
    return lease_id


def free_mb(disk: Path) -> float:
    found = os.statvfs(disk)
    return found.f_bavail * found.f_frsize / 1e6


def test_a_service_that_is_killed_on_a_full_disk_starts_and_frees_it(disk: Path) -> None:
    with life(disk, "first") as first, first.http() as http:
        lease_id = acquire(http)
        assert (disk / "state" / "reserve").stat().st_size == 16 << 20
        answer = http.post(f"/v1/leases/{lease_id}/exec", json={"command": FILL})
        assert answer.status_code in (200, 503), answer.text
        (record,) = disk.glob("state/sandboxes/*/handle.json")
        agent = psutil.Process(json.loads(record.read_text(encoding="utf-8"))["data"]["pid"])
        # Otherwise the agent ends the slot that fills the disk, and it is chance how soon the second life resets it, which frees the room.
        agent.suspend()
    # The first life gives up its reserve when it has to write. It is chance whether it had to before it was killed.
    (disk / "state" / "reserve").unlink(missing_ok=True)
    (disk / "rest").touch()
    with contextlib.suppress(OSError), (disk / "rest").open("wb", buffering=0) as file:
        while file.write(b"x" * 4096):
            pass
    assert free_mb(disk) == 0.0

    with life(disk, "second") as second, second.http() as http:
        storage = http.get("/readyz").json()["storage"]
        refused = http.post("/v1/acquire", json={"wait_s": 0})
        assert not storage["ready"]
        agent.resume()
        assert (refused.status_code, refused.json()["code"]) == (503, "storage_unavailable"), refused.text
        released = http.post("/v1/release", json={"lease_ids": [lease_id]})
        assert released.json()["released"] == [lease_id]

        for _ in range(POOL["slots_per_sandbox"]):
            acquire(http)
        assert http.get("/readyz").json()["storage"] == {"ready": True, "last_error": None}
        assert free_mb(disk) > 10.0
        assert (disk / "state" / "reserve").stat().st_size == 16 << 20
        second.process.send_signal(signal.SIGTERM)
        assert second.process.wait(20) == 0
