"""Requests of the tests of run-batches."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx

NDJSON = "application/x-ndjson"
WAIT_S = 20.0
#: Waits for the file `go` in its workspace. It appends a line to `ran` each time it runs.
WAITING = "echo ran >> ran; while [ ! -e go ]; do sleep 0.02; done; cat ran"


def program(command: str, **fields: Any) -> dict[str, Any]:
    """Return an item that runs a command."""
    return {"tool": "bash", "args": {"command": command}, **fields}


def run(http: httpx.Client, items: Sequence[Any], **header: Any) -> list[dict[str, Any]]:
    """Run items in one JSON object; return their results, in order."""
    answer = http.post("/v1/run-batch", json={"items": items, **header})
    assert answer.status_code == 200, answer.text
    results: list[dict[str, Any]] = answer.json()["results"]
    return results


@contextlib.contextmanager
def lines(http: httpx.Client, items: Sequence[Any], **header: Any) -> Iterator[Iterator[dict[str, Any]]]:
    """Send items as NDJSON; give the results as they come. Leaving the block closes the connection."""
    body = "".join(json.dumps(line) + "\n" for line in (header, *items))
    with http.stream("POST", "/v1/run-batch", content=body, headers={"content-type": NDJSON, "accept": NDJSON}) as answer:
        if answer.status_code != 200:
            answer.read()
        assert answer.status_code == 200, answer.text
        yield (json.loads(line) for line in answer.iter_lines() if line)


def leases_of(http: httpx.Client, run_id: str) -> dict[int, str]:
    """Return the leases that a run holds, by the places of their items."""
    listed = http.get("/v1/leases", params={"run_id": run_id}).raise_for_status().json()["leases"]
    return {int(lease["labels"]["item"]): lease["lease_id"] for lease in listed}


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Wait until the service reports something for which it has no event.

    Raises:
        AssertionError: it did not in time.
    """
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.01)


def begun(http: httpx.Client, run_id: str, indexes: Sequence[int]) -> dict[int, str]:
    """Wait until the programs of some items run, and no others; return their leases."""

    def has_begun(lease_id: str) -> bool:
        return http.get(f"/v1/leases/{lease_id}/files", params={"path": "ran"}).status_code == 200

    wait_for(lambda: set(leases_of(http, run_id)) == set(indexes), f"items {indexes} have slots")
    leases = leases_of(http, run_id)
    wait_for(lambda: all(map(has_begun, leases.values())), f"items {indexes} run")
    return leases


def let_go(http: httpx.Client, lease_ids: Iterator[str] | Sequence[str]) -> None:
    """Let the programs that wait in some leases end."""
    for lease_id in lease_ids:
        http.put(f"/v1/leases/{lease_id}/files", params={"path": "go"}, content=b"").raise_for_status()
