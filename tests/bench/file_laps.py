"""Timed file tools and file routes, each compared with a command in the same slot, and the transfer of a large file."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

from tests.bench.service_laps import lap_s
from tests.support.service import Service

MIB = 1 << 20
WARM_UP_LAPS = 3
LAPS = 20
LARGE_MIB = 64
LARGE_LAPS = 3
SMALL_CONTENT = b"one line of a small file\n" * 40
TREE = "mkdir -p tree/a tree/b; for n in 1 2 3 4 5 6 7 8; do echo hello $n > tree/a/$n; echo world $n > tree/b/$n; done; seq 200 > small"
COMMAND = "bash -c true"


@dataclass(frozen=True, kw_only=True)
class FileRound:
    """What one round measured.

    Args:
        operation_s: the median time of each operation by its name, in seconds. That of `COMMAND` is among them.
        in_mib_per_s: how fast a large file goes into the slot.
        out_mib_per_s: how fast it comes out again.
    """

    operation_s: Mapping[str, float]
    in_mib_per_s: float
    out_mib_per_s: float


class FileClient:
    """One kept-alive HTTP connection for the tools and files of one lease.

    Args:
        service: the running service.
        lease_id: the lease.
    """

    def __init__(self, service: Service, lease_id: str) -> None:
        address = urlsplit(service.url)
        self._connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
        self._headers = {**service.headers, "Content-Type": "application/json"}
        self._lease_id = lease_id

    def request(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """Send a request and return the body of the response.

        Raises:
            RuntimeError: the request did not succeed.
        """
        self._connection.request(method, path, body, self._headers)
        response = self._connection.getresponse()
        raw = response.read()
        if response.status not in (http.client.OK, http.client.NO_CONTENT):
            raise RuntimeError(f"{method} {path}: {response.status} {raw[:1000]!r}")
        return raw

    def call(self, tool: str, **args: Any) -> None:
        """Run one tool call.

        Raises:
            RuntimeError: the call did not succeed.
        """
        body = json.dumps({"calls": [{"lease_id": self._lease_id, "tool": tool, "args": args}]})
        (result,) = json.loads(self.request("POST", "/v1/exec-batch", body.encode()))["results"]
        if not result["success"]:
            raise RuntimeError(f"{tool} did not succeed: {result}")

    def get(self, path: str) -> bytes:
        """Read a file by the routes."""
        return self.request("GET", f"/v1/leases/{self._lease_id}/files?path={quote(path)}")

    def put(self, path: str, content: bytes) -> None:
        """Write a file by the routes."""
        self.request("PUT", f"/v1/leases/{self._lease_id}/files?path={quote(path)}", content)


class FileLaps:
    """The operations that are measured, in one slot.

    Args:
        service: the running service.
        lease_id: the lease of the slot; nobody else uses it.
    """

    def __init__(self, service: Service, lease_id: str) -> None:
        self._client = client = FileClient(service, lease_id)
        self._large = os.urandom(MIB) * LARGE_MIB
        client.call("bash", command=TREE)
        edits = itertools.cycle([("\n7\n8\n", "\n7\neight\n"), ("\n7\neight\n", "\n7\n8\n")])

        def edit() -> None:
            old, new = next(edits)
            client.call("edit_file", path="small", old=old, new=new)

        self._operations: dict[str, Callable[[], object]] = {
            COMMAND: lambda: client.call("bash", command="true"),
            "read_file": lambda: client.call("read_file", path="small"),
            "write_file": lambda: client.call("write_file", path="written", content=SMALL_CONTENT.decode()),
            "edit_file": edit,
            "list_files": lambda: client.call("list_files", path="tree/a"),
            "search_files": lambda: client.call("search_files", path="tree", pattern="wor+ld"),
            "GET files": lambda: client.get("small"),
            "PUT files": lambda: client.put("put", SMALL_CONTENT),
        }
        for operation in self._operations.values():
            for _ in range(WARM_UP_LAPS):
                operation()

    def measure_round(self) -> FileRound:
        """Measure every operation once. The laps of all operations alternate, so that a busy moment slows them alike."""
        laps_s: dict[str, list[float]] = {name: [] for name in self._operations}
        for _ in range(LAPS):
            for name, operation in self._operations.items():
                laps_s[name].append(lap_s(operation))
        in_s = statistics.median(lap_s(lambda: self._client.put("large", self._large)) for _ in range(LARGE_LAPS))
        out_s = statistics.median(lap_s(lambda: self._client.get("large")) for _ in range(LARGE_LAPS))
        return FileRound(
            operation_s={name: statistics.median(laps) for name, laps in laps_s.items()},
            in_mib_per_s=LARGE_MIB / in_s,
            out_mib_per_s=LARGE_MIB / out_s,
        )
