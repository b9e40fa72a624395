"""A real service, its agents and slots as the host sees them, and calls whose results are looked at as any caller may rely on them."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import psutil

from tests.support.service import Service, clean_environ, listening_url, start_serve, wait_until_ready
from tests.support.users import ME, Runner

Result = dict[str, Any]
FAULTS = {"none", "policy", "infra", "ambiguous"}
_PIDFD_GETFD = 438  # the same on every processor
_libc = ctypes.CDLL(None, use_errno=True)

# Takes every process its slot may have, and takes it again as soon as one is free.
TAKE_ALL_PROCESSES = """
import os, time
if os.fork(): os._exit(0)
os.setsid()
while True:
    try:
        if os.fork() == 0:
            time.sleep(1000)
            os._exit(0)
    except OSError:
        time.sleep(0.0002)
"""
HOG = "python3 -c 'x = bytearray(300 << 20); print(len(x))'"


def check(result: Result) -> Result:
    """What holds for every result, whatever it is."""
    assert result["fault"] in FAULTS, result
    assert result["success"] == (result["reason"] == "exit" and (result["exit_code"] == 0 or (result["exit_code"] is None and not result["error"]))), result
    assert bool(result["error"]) == (result["reason"] != "exit"), result
    assert "\n" not in result["error"], result
    assert result["started_at"] > 0, result
    if not result["success"]:
        assert isinstance(result["metadata"]["evidence"], dict), result
        assert result["metadata"]["evidence"], result
    return result


def blame(result: Result) -> tuple[str, str, int | None]:
    """How a call ended and who is to blame: what a trainer decides by."""
    return result["reason"], result["fault"], result["exit_code"]


def proof(result: Result) -> dict[str, Any]:
    """What the verdict rests on."""
    evidence: dict[str, Any] = result["metadata"]["evidence"]
    return evidence


def fault_of_late(result: Result) -> str:
    """Who is to blame for a missed deadline: nobody, where other programs had the processor, which they may on the machine that runs this test."""
    return "ambiguous" if "starved" in proof(result) else "policy"


class PoolHarness:
    """One pool of a running service."""

    def __init__(self, service: Service, runner: Runner = ME, pool: str = "default") -> None:
        self.service = service
        self.runner = runner
        self.pool = pool
        self._threads = ThreadPoolExecutor(16)
        self.held: list[str] = []

    def acquire(self, count: int = 1, **fields: Any) -> list[dict[str, Any]]:
        """Leases, in one sandbox if there is room in one."""
        with self.service.http() as http:
            answer = http.post("/v1/acquire", json={"count": count, "ttl_s": 600, "pool": self.pool, **fields})
        assert answer.status_code == 200, answer.text
        leases: list[dict[str, Any]] = answer.json()["leases"]
        self.held += [lease["lease_id"] for lease in leases]
        return leases

    def release_all(self) -> None:
        """Give everything back, and wait until it is clean."""
        held, self.held = self.held, []
        self.ask("POST", "/v1/release", json={"lease_ids": held})
        self.until(lambda: not self.slots()["resetting"])

    def ask(self, method: str, path: str, **options: Any) -> Any:
        """The answer of one request, as JSON."""
        with self.service.http() as http:
            return http.request(method, path, **options).json()

    def slots(self) -> dict[str, int]:
        """How many slots are in which state."""
        slots: dict[str, int] = self.view()["slots"]
        return slots

    def view(self) -> dict[str, Any]:
        """The pool as the service reports it."""
        view: dict[str, Any] = self.ask("GET", f"/v1/pools/{self.pool}")
        return view

    def batch(self, *calls: Mapping[str, Any]) -> list[Result]:
        """One request of calls."""
        with self.service.http() as http:
            answer = http.post("/v1/exec-batch", json={"calls": calls}, timeout=180.0)  # longer than any call of these tests may take
        assert answer.status_code == 200, answer.text
        return [check(result) for result in answer.json()["results"]]

    def call(self, lease: Mapping[str, Any], tool: str, args: Mapping[str, Any], **fields: Any) -> Result:
        """One call."""
        return self.batch({"lease_id": lease["lease_id"], "tool": tool, "args": args, "timeout_s": 30, **fields})[0]

    def bash(self, lease: Mapping[str, Any], command: str, **fields: Any) -> Result:
        """One command."""
        return self.call(lease, "bash", {"command": command}, **fields)

    def python(self, lease: Mapping[str, Any], script: str, **fields: Any) -> Result:
        """One program."""
        return self.call(lease, "bash", {"command": "exec python3 -", "stdin": script}, **fields)

    def begin(self, *calls: Mapping[str, Any]) -> Future[list[Result]]:
        """A request of calls that the test does not wait for."""
        return self._threads.submit(self.batch, *calls)

    def begin_bash(self, lease: Mapping[str, Any], command: str, **fields: Any) -> Future[list[Result]]:
        """A command that has begun when this returns."""
        mark = f"began-{uuid.uuid4().hex}"
        call = {"lease_id": lease["lease_id"], "tool": "bash", "args": {"command": f"touch {mark}; {command}"}, "timeout_s": 30, **fields}
        running = self.begin(call)
        self.until_in(lease, f"[ -e {mark} ]")
        return running

    def until_in(self, lease: Mapping[str, Any], condition: str) -> None:
        """Wait until a condition holds in a slot."""
        assert self.bash(lease, f"until {condition}; do sleep 0.02; done", timeout_s=10)["success"], condition

    @staticmethod
    def until(condition: Any, within_s: float = 60.0) -> None:
        """Wait for what has no event."""
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, "it did not come true"
            time.sleep(0.02)

    # As the host sees it.

    def agent(self, lease: Mapping[str, Any]) -> psutil.Process:
        """The agent of a lease's sandbox."""
        handle = json.loads((self.service.state_dir / "sandboxes" / lease["sandbox_id"] / "handle.json").read_text(encoding="utf-8"))
        return psutil.Process(handle["data"]["pid"])

    def init(self, lease: Mapping[str, Any]) -> psutil.Process:
        """The first process of a lease's slot."""
        mark = f"89{uuid.uuid4().int % 10**9}"
        assert self.bash(lease, f"sleep {mark} > /dev/null 2>&1 &")["success"]
        found: list[psutil.Process] = []

        def began() -> bool:
            found[:] = [process for process in self.agent(lease).children(recursive=True) if _command_line(process) == ["sleep", mark]]
            return bool(found)

        self.until(began)
        parent = found[0].parent()
        assert parent is not None
        found[0].kill()
        return parent

    def cut_links(self) -> int:
        """Break every connection of the service to an agent, as a network would; how many there were."""
        pid, count = self.service.process.pid, 0
        pidfd = os.pidfd_open(pid)
        try:
            for name in os.listdir(f"/proc/{pid}/fd"):
                taken = _libc.syscall(_PIDFD_GETFD, pidfd, int(name), 0)
                if taken < 0 or not os.readlink(f"/proc/self/fd/{taken}").startswith("socket:"):
                    if taken >= 0:
                        os.close(taken)
                    continue
                with socket.socket(fileno=taken) as ours, contextlib.suppress(OSError):
                    if ours.family == socket.AF_UNIX and "agent.sock" in str(ours.getpeername()):
                        ours.shutdown(socket.SHUT_RDWR)
                        count += 1
        finally:
            os.close(pidfd)
        return count

    def kill_service(self) -> None:
        """SIGKILL."""
        self.service.process.send_signal(signal.SIGKILL)
        self.service.process.wait()

    def start_service_again(self) -> None:
        """Another service on the same state and settings."""
        service, read_write = self.service, os.pipe()
        environ = {"SANDBOX_CONFIG": str(service.state_dir.parent / "config.yaml"), "SANDBOX_STATE_DIR": str(service.state_dir), **self.runner.environ}
        with service.log_path.open("ab") as log, open(read_write[0], "rb") as ready:
            arguments = ["--host", "127.0.0.1", "--port", "0"]
            service.process = start_serve(arguments, clean_environ(environ), log, read_write[1], self.runner)
            os.close(read_write[1])
            service.url = listening_url(service, ready)
        wait_until_ready(service)

    def close(self) -> None:
        """No more requests."""
        self._threads.shutdown()


@contextlib.contextmanager
def frozen(*processes: psutil.Process) -> Iterator[None]:
    """Processes that stand still meanwhile."""
    send(signal.SIGSTOP, processes)
    try:
        yield
    finally:
        send(signal.SIGCONT, processes)


def send(number: int, processes: Sequence[psutil.Process]) -> None:
    """Signal those that are still there."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def wait_gone(processes: list[psutil.Process]) -> None:
    """Wait until none of these is there any more."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(process.pid)
            try:
                assert select.select([pidfd], [], [], 10.0)[0], process
            finally:
                os.close(pidfd)


def _command_line(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.cmdline()
    return []
