"""A real service in one isolation mode, as one user, and what a test does to it over HTTP."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil
import pytest

from tests.support.service import TRANSPORT_VARIABLE, running_service
from tests.support.users import ME, ordinary_user

POOL = {
    "backend": "local",
    "slots_per_sandbox": 3,
    "min_sandboxes": 1,
    "max_sandboxes": 1,
    "require_sandbox": True,
    "slot_processes": 200,
    "max_file_mb": 64,
    "on_shutdown": "destroy",
}

# The isolation modes of this machine, each with the user that the service runs as.
HARNESSES = [("bwrap", "root"), ("uid", "root"), ("bwrap", "user")] if os.geteuid() == 0 else [("bwrap", "user")]
# Marks the tests of what is the same code in every isolation mode: they run in the first mode.
in_one_mode = pytest.mark.parametrize("running_harness", HARNESSES[:1], indirect=True, ids="-".join)


@dataclass
class HostileHarness:
    """A running service that the hostile suite attacks.

    Args:
        mode: the isolation mode that its slots are in.
        user: `root` or `user`.
        url, token, state_dir, pid: of the service.
    """

    mode: str
    user: str
    url: str
    token: str
    state_dir: str
    pid: int
    client: httpx.Client = field(init=False)
    held: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.client = httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {self.token}"}, timeout=280)

    @property
    def name(self) -> str:
        """How the table calls it."""
        return f"`{self.mode}` as {self.user}"

    @property
    def as_root(self) -> bool:
        """Whether the service runs as root."""
        return self.user == "root"

    @property
    def port(self) -> int:
        """Where the service listens."""
        return httpx.URL(self.url).port or 0

    def post(self, path: str, body: Any) -> httpx.Response:
        """One POST."""
        return self.client.post(path, json=body)

    def acquire(self, **fields: Any) -> dict[str, Any]:
        """One lease."""
        answer = self.post("/v1/acquire", {"ttl_s": 600, **fields})
        assert answer.status_code == 200, answer.text
        lease: dict[str, Any] = answer.json()["leases"][0]
        assert lease["isolation"] == self.mode
        self.held.append(lease["lease_id"])
        return lease

    def batch(self, *calls: dict[str, Any]) -> list[dict[str, Any]]:
        """Run several tool calls with one request; those of different leases run at the same time."""
        answer = self.post("/v1/exec-batch", {"calls": calls})
        assert answer.status_code == 200, answer.text
        results: list[dict[str, Any]] = answer.json()["results"]
        return results

    def call(self, lease: dict[str, Any], tool: str, args: dict[str, Any], **options: Any) -> dict[str, Any]:
        """One tool call."""
        (result,) = self.batch({"lease_id": lease["lease_id"], "tool": tool, "args": args, **options})
        return result

    def bash(self, lease: dict[str, Any], command: str, **options: Any) -> dict[str, Any]:
        """One command."""
        return self.call(lease, "bash", {"command": command}, **{"timeout_s": 60, **options})

    def python(self, lease: dict[str, Any], script: str, timeout_s: float = 60, **env: str) -> dict[str, Any]:
        """One Python program, fed to the slot's own interpreter."""
        return self.call(lease, "bash", {"command": "/usr/bin/python3 -I -", "stdin": script, "env": env}, timeout_s=timeout_s)

    def every_slot(self) -> list[dict[str, Any]]:
        """A lease of every slot there is, so that nothing hides in one that was not looked at."""
        return [self.acquire() for _ in range(self.pool()["spec"]["slots_per_sandbox"])]

    def release(self, *leases: dict[str, Any]) -> None:
        """Give leases back."""
        ids = [lease["lease_id"] for lease in leases]
        answer = self.post("/v1/release", {"lease_ids": ids})
        assert answer.status_code == 200, answer.text
        assert sorted(answer.json()["released"]) == sorted(ids)
        self.held = [held for held in self.held if held not in ids]

    def release_all(self) -> None:
        """Give back whatever this test holds."""
        if self.held:
            self.post("/v1/release", {"lease_ids": self.held})
            self.held = []

    def pool(self) -> dict[str, Any]:
        """The pool as the service shows it."""
        answer = self.client.get("/v1/pools/default")
        assert answer.status_code == 200, answer.text
        view: dict[str, Any] = answer.json()
        return view

    def settled(self, within_s: float = 30) -> dict[str, Any]:
        """Wait until no slot is being reset, and return the pool."""
        deadline = time.monotonic() + within_s
        while (view := self.pool())["slots"]["resetting"] or view["sandboxes"]["starting"]:
            assert time.monotonic() < deadline, view
            time.sleep(0.02)
        return view

    def still_sound(self) -> None:
        """The service answers, and nothing has been quarantined or failed."""
        assert self.client.get("/healthz").json() == {"status": "ok"}
        view = self.pool()
        assert view["slots"]["quarantined"] == 0, view
        assert view["sandboxes"]["failed"] == 0, view

    def agent_pids(self) -> list[int]:
        """The agents of this service, as the host sees them."""
        found = []
        for child in psutil.Process(self.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):  # a zombie as well
                if any("agent" in part for part in child.cmdline()):
                    found.append(child.pid)
        return found

    def processes(self, marker: str) -> list[psutil.Process]:
        """Processes of the whole machine whose command line holds the marker."""
        return [process for process in psutil.process_iter(["cmdline"]) if any(marker in part for part in process.info["cmdline"] or [])]

    def host_uid_of(self, lease: dict[str, Any]) -> int:
        """The uid, on the host, of what runs in the lease's slot."""
        marker = f"31{time.monotonic_ns() % 10**12}"
        assert self.bash(lease, f"sleep {marker} >/dev/null 2>&1 & until grep -q sleep /proc/$!/comm; do :; done")["success"]
        (process,) = [found for found in self.processes(marker) if found.name() == "sleep"]
        return int(process.uids().real)


def timeout_fault(result: dict[str, Any]) -> str:
    """Return the fault that a call has earned that ran into its deadline: other work may have kept the processors of this machine from it."""
    return "ambiguous" if "starved" in result["metadata"].get("evidence", {}) else "policy"


@contextlib.contextmanager
def open_hostile_harness(mode: str, user: str, transport: str | None = None) -> Iterator[HostileHarness]:
    """Start a service in one isolation mode, and stop it at the end.

    Args:
        mode: the isolation mode. For `uid`, the PATH of the service is an empty folder, as on a machine without bubblewrap.
        user: `root` or `user`, whom the service runs as.
        transport: how the service reaches its agents; None for the default.
    """
    assert mode != "bwrap" or shutil.which("bwrap"), "bubblewrap is not installed: `make setup` says how to get it"
    runner = ME if user == ("root" if os.geteuid() == 0 else "user") else ordinary_user()
    with tempfile.TemporaryDirectory() as empty:
        environ = {"PATH": empty} if mode == "uid" else {}
        if transport is not None:
            environ[TRANSPORT_VARIABLE] = transport
        with running_service({"pools": {"default": POOL}}, env=environ, runner=runner) as service:
            harness = HostileHarness(mode=mode, user=user, url=service.url, token=service.token, state_dir=str(service.state_dir), pid=service.process.pid)
            yield harness
            harness.client.close()
