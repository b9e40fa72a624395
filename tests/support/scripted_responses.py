"""A service that sends prepared responses, for tests of the client without sockets."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx

URL = "http://pool.test"
Step = httpx.Response | Exception | Callable[[httpx.Request], httpx.Response]


class Script:
    """Responds to each request with the next prepared step, and records the requests. The last step is repeated."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        step = self.steps.pop(0) if len(self.steps) > 1 else self.steps[0]
        if isinstance(step, Exception):
            raise step
        return step(request) if callable(step) else step

    def bodies(self) -> list[Any]:
        return [json.loads(request.content) for request in self.requests]


class ScriptedTransport(httpx.MockTransport):
    """Passes requests to a script. A request whose step is a failed connection is not sent, so its body is not read."""

    def __init__(self, script: Script) -> None:
        super().__init__(script)
        self._script = script

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self._connect(request)
        return super().handle_request(request)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self._connect(request)
        return await super().handle_async_request(request)

    def _connect(self, request: httpx.Request) -> None:
        if isinstance(self._script.steps[0], httpx.ConnectError):
            self._script(request)


class FakeTime:
    """A clock that advances only while a test sleeps."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.slept_s: list[float] = []

    def clock(self) -> float:
        return self.now_s

    def sleep(self, wait_s: float) -> None:
        self.slept_s.append(wait_s)
        self.now_s += wait_s

    async def asleep(self, wait_s: float) -> None:
        self.sleep(wait_s)


def problem(status: int, code: str, *, headers: dict[str, str] | None = None, **members: Any) -> httpx.Response:
    """Return a response with a problem document."""
    body = {"type": "about:blank", "title": code, "status": status, "detail": f"because of {code}", "code": code, **members}
    return httpx.Response(status, json=body, headers={"content-type": "application/problem+json", **(headers or {})})


def a_result(call_id: str, lease_id: str = "l-1", **fields: Any) -> dict[str, Any]:
    """Return a result as the service sends it, with a field that only a newer service has."""
    return {"call_id": call_id, "lease_id": lease_id, "success": True, "exit_code": 0, "reason": "exit", "fault": "none", "output": "", "newer": 1, **fields}


def a_lease(lease_id: str = "l-1", **fields: Any) -> dict[str, Any]:
    """Return a lease as the service sends it, with a field that only a newer service has."""
    return {"lease_id": lease_id, "epoch": 7, "pool": "default", "sandbox_id": "s-1", "slot_id": "s-1/0", "expires_at": 9.0, "newer": 1, **fields}
