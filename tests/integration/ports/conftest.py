"""A lease without network, and the server of `tests/support/slot_server.py` in its slot."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.support.service import Service
from tests.support.users import ROOT

SLOT_SERVER = ROOT / "tests" / "support" / "slot_server.py"
PORT = 8000


@dataclass(frozen=True, kw_only=True)
class ServedSlot:
    """A held slot, and the client that holds it.

    Args:
        service: the service.
        http: an HTTP client of the service.
        lease_id: the lease.
    """

    service: Service
    http: httpx.Client
    lease_id: str

    @property
    def path(self) -> str:
        """The path of the service for the port, without a slash at its end."""
        return f"/v1/leases/{self.lease_id}/ports/{PORT}"

    @property
    def ws_url(self) -> str:
        """The WebSocket URL of the port, without a slash at its end."""
        return self.service.url.replace("http", "ws", 1) + self.path

    def bash(self, command: str) -> str:
        """Run a command in the slot, and return its output."""
        result: dict[str, Any] = self.http.post(f"/v1/leases/{self.lease_id}/exec", json={"command": command, "timeout_s": 60}).json()
        assert result.get("exit_code") == 0, result
        return str(result["output"])

    def wait_for_file(self, name: str) -> str:
        """Wait until a file of the workspace has content or at least exists, and return its content."""
        return self.bash(f"until test -e {name}; do sleep 0.02; done; cat {name}")

    def start_server(self, port: int = PORT, address: str = "127.0.0.1") -> None:
        """Start a server on a port of the slot, and wait until it listens."""
        content = SLOT_SERVER.read_bytes()
        self.http.put(f"/v1/leases/{self.lease_id}/files", params={"path": "slot_server.py"}, content=content).raise_for_status()
        self.bash(f"python3 slot_server.py {port} {address} > log{port} 2>&1 & until grep -q up log{port}; do sleep 0.02; done")

    def release(self) -> None:
        """Release the lease."""
        self.http.post("/v1/release", json={"lease_ids": [self.lease_id]}).raise_for_status()


@contextlib.contextmanager
def held_slot(service: Service, **options: object) -> Iterator[ServedSlot]:
    """A slot with a network of its own, in which nothing listens yet.

    Args:
        service: the service.
        options: fields of the acquire; one without network if none are given.
    """
    with service.http() as http:
        leases = http.post("/v1/acquire", json=options or {"allow_network": False}).raise_for_status().json()["leases"]
        held = ServedSlot(service=service, http=http, lease_id=leases[0]["lease_id"])
        yield held
        held.release()


@pytest.fixture
def slot(service: Service) -> Iterator[ServedSlot]:
    """A slot with a network of its own, in which nothing listens yet."""
    with held_slot(service) as held:
        yield held


@pytest.fixture
def served(slot: ServedSlot) -> ServedSlot:
    """A slot with a network of its own, in which the server listens."""
    slot.start_server()
    return slot
