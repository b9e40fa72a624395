"""A service of one's own: it serves, it ends with its object, and it ends with its process however that ends."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from env_client import EmbeddedFailed, embedded
from tests.support.prepared.service import prepared_python

POOLS = {"default": {"slots_per_sandbox": 2, "min_sandboxes": 1, "max_sandboxes": 1}}
END_S = 30.0

OWNER = f"""
import json, sys
from env_client import embedded
service = embedded({POOLS!r})
with service.client() as client:
    lease = client.acquire(wait_s=30).leases[0]
    client.exec(lease.lease_id, "bash", {{"command": "sleep 1000 >/dev/null 2>&1 &"}})
    print(json.dumps({{"pid": service.pid, "state_dir": str(service.state_dir)}}), flush=True)
    sys.stdin.read()
"""


@contextmanager
def watched(pids: list[int]) -> Iterator[list[int]]:
    """Descriptors that become readable when a process has ended, of those that have not ended yet: a slot that is being reset ends processes."""
    descriptors = []
    try:
        for pid in pids:
            with suppress(ProcessLookupError):
                descriptors.append(os.pidfd_open(pid))
        yield descriptors
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def all_ended(descriptors: list[int]) -> bool:
    return all(select.select([descriptor], [], [], END_S)[0] for descriptor in descriptors)


def family(pid: int) -> list[int]:
    """A process and all that come from it."""
    return [pid, *[child.pid for child in psutil.Process(pid).children(recursive=True)]]


def test_it_serves_and_ends_with_its_block() -> None:
    with embedded(POOLS) as service:
        with service.client() as client, client.lease(wait_s=30) as lease:
            assert lease.bash("echo hello").output == "hello\n"
        state_dir, pids = service.state_dir, family(service.pid)
        with watched(pids) as ends:
            service.close()
            assert all_ended(ends)

    assert len(pids) > 3
    assert not state_dir.exists()


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_its_process(end: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        told = json.loads(owner.stdout.readline())
        with watched(family(told["pid"])) as ends:
            owner.send_signal(end)
            owner.wait()

            assert all_ended(ends)
        assert not Path(told["state_dir"]).exists()


def test_a_service_that_cannot_start_says_why() -> None:
    with pytest.raises(EmbeddedFailed, match="slots_per_sandboxes"):
        embedded({"default": {"slots_per_sandboxes": 2}})


def test_a_service_whose_interpreter_is_missing_leaves_no_folder_and_no_open_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-such-python"))
    open_files = psutil.Process().num_fds()
    with pytest.raises(FileNotFoundError, match="no-such-python"):
        embedded()

    assert list(tmp_path.iterdir()) == []
    assert psutil.Process().num_fds() == open_files


def test_two_do_not_meet_and_the_default_pool_is_the_only_one_or_the_named_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(prepared_python()))
    small = {"slots_per_sandbox": 1, "min_sandboxes": 0, "max_sandboxes": 1}
    with embedded({"mine": small}) as one, embedded({"mine": small, "other": small}, default_pool="other") as other:
        assert one.url != other.url
        assert one.token != other.token
        for service, pool in ((one, "mine"), (other, "other")):
            with service.client() as client, client.lease(wait_s=30) as lease:
                assert lease.info.pool == pool


def test_a_service_without_a_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a pool"):
        embedded({})
