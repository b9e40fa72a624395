"""Four interfaces to the service that do the same operations: curl, the command line, and the two Python clients."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import threading
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from env_client import AsyncSandboxClient, Call, Result, SandboxClient, SandboxError
from tests.support.prepared.cli import prepared_cli
from tests.support.service import Service, clean_environ

T = TypeVar("T")
TIMEOUT_S = 30


class Outcome(NamedTuple):
    """The result of a command."""

    output: str
    exit_code: int | None
    reason: str


class Refused(Exception):
    """The service, or the program that was used, refused the operation; the text is the error code."""


class Walker(Protocol):
    """One interface to the service. Every method raises `Refused` if the service responds with an error."""

    def acquire(self, run_id: str) -> str: ...
    def held(self, run_id: str) -> list[str]: ...
    def exec(self, lease: str, command: str) -> Outcome: ...
    def batch(self, lease: str, commands: list[str]) -> list[Outcome]: ...
    def write(self, lease: str, path: str, content: bytes) -> None: ...
    def read(self, lease: str, path: str) -> bytes: ...
    def list(self, lease: str, path: str) -> list[tuple[str, int]]: ...
    def copy(self, lease: str, source: str, target: str) -> None: ...
    def renew(self, lease: str, ttl_s: float) -> float: ...
    def interrupt(self, lease: str, command: str, first_line: str) -> Outcome: ...
    def narrow(self, lease: str) -> bool: ...
    def release(self, lease: str) -> list[str]: ...
    def close(self) -> None: ...


def outcome(result: Result | Mapping[str, Any]) -> Outcome:
    known = result if isinstance(result, Mapping) else {"output": result.output, "exit_code": result.exit_code, "reason": result.reason}
    return Outcome(known["output"], known["exit_code"], known["reason"])


def entry_name(path: str) -> str:
    return path.rpartition("/")[2]


class Curl:
    """Uses curl only."""

    def __init__(self, service: Service, folder: Path) -> None:
        self._service, self._folder = service, folder

    def _words(self, path: str, *more: str) -> list[str]:
        return ["curl", "-sS", "-H", f"Authorization: Bearer {self._service.token}", f"{self._service.url}{path}", *more]

    def _raw(self, path: str, *more: str) -> bytes:
        done = subprocess.run(self._words(path, *more, "-w", "\n%{http_code}"), capture_output=True, timeout=TIMEOUT_S, check=True)
        body, _, status = done.stdout.rpartition(b"\n")
        if int(status) >= 400:
            raise Refused(json.loads(body)["code"])
        return body

    def _json(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        return json.loads(self._raw(path, *(["-d", json.dumps(body)] if body is not None else [])))

    def acquire(self, run_id: str) -> str:
        return str(self._json("/v1/acquire", {"run_id": run_id})["leases"][0]["lease_id"])

    def held(self, run_id: str) -> list[str]:
        return [lease["lease_id"] for lease in self._json(f"/v1/leases?run_id={run_id}")["leases"]]

    def exec(self, lease: str, command: str) -> Outcome:
        return outcome(self._json(f"/v1/leases/{lease}/exec", {"command": command}))

    def batch(self, lease: str, commands: list[str]) -> list[Outcome]:
        calls = [{"lease_id": lease, "tool": "bash", "args": {"command": command}} for command in commands]
        return [outcome(result) for result in self._json("/v1/exec-batch", {"calls": calls})["results"]]

    def write(self, lease: str, path: str, content: bytes) -> None:
        local = self._folder / "upload"
        local.write_bytes(content)
        self._raw(f"/v1/leases/{lease}/files?path={path}", "-X", "PUT", "--data-binary", f"@{local}")

    def read(self, lease: str, path: str) -> bytes:
        return self._raw(f"/v1/leases/{lease}/files?path={path}")

    def list(self, lease: str, path: str) -> list[tuple[str, int]]:
        entries = self._json(f"/v1/leases/{lease}/files/list?path={path}")["entries"]
        return [(entry_name(entry["path"]), entry["size_bytes"]) for entry in entries]

    def copy(self, lease: str, source: str, target: str) -> None:
        local = self._folder / "tree.tar.gz"
        local.write_bytes(self._raw(f"/v1/leases/{lease}/archive?path={source}"))
        self._raw(f"/v1/leases/{lease}/archive?path={target}", "-X", "PUT", "--data-binary", f"@{local}")

    def renew(self, lease: str, ttl_s: float) -> float:
        return float(self._json("/v1/renew", {"lease_ids": [lease], "ttl_s": ttl_s})["leases"][0]["expires_at"])

    def interrupt(self, lease: str, command: str, first_line: str) -> Outcome:
        body = json.dumps({"command": command, "call_id": "interrupted"})
        stream = self._words(f"/v1/leases/{lease}/exec", "-N", "-H", "Accept: text/event-stream", "-d", body)
        with subprocess.Popen(stream, stdout=subprocess.PIPE) as running:
            assert running.stdout is not None
            while json.dumps(first_line).encode() not in (line := running.stdout.readline()):
                assert line, "the stream ended early"
            ended = self._json("/v1/cancel", {"lease_id": lease, "call_id": "interrupted"})
            running.communicate(timeout=TIMEOUT_S)
        return outcome(ended)

    def narrow(self, lease: str) -> bool:
        return bool(self._json(f"/v1/leases/{lease}/narrow", {"allow_network": False})["allow_network"])

    def release(self, lease: str) -> list[str]:
        return list(self._json("/v1/release", {"lease_ids": [lease]})["released"])

    def close(self) -> None: ...


class CommandLineWalker:
    """Uses the command line `sandbox`."""

    def __init__(self, service: Service, folder: Path) -> None:
        self._folder = folder
        self._environ = clean_environ({"SANDBOX_URL": service.url, "SANDBOX_TOKEN": service.token})

    def _bytes(self, *words: str, stdin: bytes = b"") -> tuple[bytes, int]:
        done = prepared_cli().run(words, self._environ, self._folder, stdin, TIMEOUT_S)
        if done.returncode == 125 and "--json" in words:
            raise Refused(json.loads(done.stdout.splitlines()[-1])["error"]["code"])
        assert done.returncode != 125, done.stderr.decode()
        return done.stdout, done.returncode

    def _json(self, *words: str) -> Any:
        return json.loads(self._bytes(words[0], "--json", *words[1:])[0])

    def acquire(self, run_id: str) -> str:
        return self._bytes("acquire", "--run-id", run_id)[0].decode().strip()

    def held(self, run_id: str) -> list[str]:
        return self._bytes("leases", "--quiet", "--run-id", run_id)[0].decode().split()

    def exec(self, lease: str, command: str) -> Outcome:
        return outcome(self._json("exec", lease, "--", "bash", "-c", command))

    def batch(self, lease: str, commands: list[str]) -> list[Outcome]:
        return [self.exec(lease, command) for command in commands]

    def write(self, lease: str, path: str, content: bytes) -> None:
        self._bytes("cp", "-", f"{lease}:{path}", stdin=content)

    def read(self, lease: str, path: str) -> bytes:
        return self._bytes("cp", f"{lease}:{path}", "-")[0]

    def list(self, lease: str, path: str) -> list[tuple[str, int]]:
        return [(entry_name(entry["path"]), entry["size_bytes"]) for entry in self._json("ls", f"{lease}:{path}")["entries"]]

    def copy(self, lease: str, source: str, target: str) -> None:
        self._bytes("cp", f"{lease}:{source}", "tree")
        self._bytes("cp", "tree", f"{lease}:{target}")

    def renew(self, lease: str, ttl_s: float) -> float:
        return float(self._json("renew", lease, "--ttl", str(ttl_s))["leases"][0]["expires_at"])

    def interrupt(self, lease: str, command: str, first_line: str) -> Outcome:
        words = ["exec", lease, "--", "bash", "-c", command]
        with open(os.devnull, "r+b") as nothing:
            running = prepared_cli().start(words, self._environ, self._folder, (nothing.fileno(), None, nothing.fileno()))
        with running:
            assert running.stdout is not None
            printed = running.stdout.readline().decode()
            assert printed == first_line
            running.send_signal(signal.SIGINT)  # what Ctrl-C sends
            printed += running.stdout.read().decode()
            running.wait(TIMEOUT_S)
        return Outcome(printed, None, {130: "cancelled"}.get(running.returncode, f"exit code {running.returncode}"))

    def narrow(self, lease: str) -> bool:
        return bool(self._json("narrow", lease, "--no-network")["leases"][0]["allow_network"])

    def release(self, lease: str) -> list[str]:
        return list(self._json("release", lease)["released"])

    def close(self) -> None: ...


class Threads:
    """Uses `SandboxClient`."""

    def __init__(self, service: Service, folder: Path) -> None:
        self._client, self._folder = SandboxClient(service.url, service.token), folder

    def acquire(self, run_id: str) -> str:
        return self._client.acquire(run_id=run_id).leases[0].lease_id

    def held(self, run_id: str) -> list[str]:
        return [info.lease_id for info in self._client.iter_leases(run_id=run_id)]

    def exec(self, lease: str, command: str) -> Outcome:
        try:
            return outcome(self._client.exec(lease, "bash", {"command": command}))
        except SandboxError as error:
            raise Refused(error.code) from error

    def batch(self, lease: str, commands: list[str]) -> list[Outcome]:
        return [outcome(result) for result in self._client.exec_batch([Call(lease_id=lease, tool="bash", args={"command": one}) for one in commands])]

    def write(self, lease: str, path: str, content: bytes) -> None:
        self._client.put_file(lease, path, content)

    def read(self, lease: str, path: str) -> bytes:
        return self._client.get_file(lease, path)

    def list(self, lease: str, path: str) -> list[tuple[str, int]]:
        return [(entry_name(entry.path), entry.size_bytes) for entry in self._client.list_files(lease, path)]

    def copy(self, lease: str, source: str, target: str) -> None:
        local = self._folder / "tree.tar.gz"
        self._client.get_archive_to(lease, source, local)
        self._client.put_archive(lease, target, local)

    def renew(self, lease: str, ttl_s: float) -> float:
        return self._client.renew([lease], ttl_s).leases[0].expires_at

    def interrupt(self, lease: str, command: str, first_line: str) -> Outcome:
        stream = self._client.exec_events(lease, "bash", {"command": command}, call_id="interrupted")
        first = next(stream)
        assert not isinstance(first, Result)
        assert first.text == first_line
        ender = threading.Thread(target=self._client.cancel, args=(lease, "interrupted"))
        ender.start()
        *_, result = stream
        ender.join(TIMEOUT_S)
        assert isinstance(result, Result)
        return outcome(result)

    def narrow(self, lease: str) -> bool:
        return self._client.narrow(lease, allow_network=False).allow_network

    def release(self, lease: str) -> list[str]:
        return list(self._client.release([lease]).released)

    def close(self) -> None:
        self._client.close()


class EventLoop:
    """Uses `AsyncSandboxClient`."""

    def __init__(self, service: Service, folder: Path) -> None:
        self._folder = folder
        self._runner = asyncio.Runner()
        self._client = AsyncSandboxClient(service.url, service.token)

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    def acquire(self, run_id: str) -> str:
        return self._do(self._client.acquire(run_id=run_id)).leases[0].lease_id

    def held(self, run_id: str) -> list[str]:
        async def ids() -> list[str]:
            return [info.lease_id async for info in self._client.iter_leases(run_id=run_id)]

        return self._do(ids())

    def exec(self, lease: str, command: str) -> Outcome:
        try:
            return outcome(self._do(self._client.exec(lease, "bash", {"command": command})))
        except SandboxError as error:
            raise Refused(error.code) from error

    def batch(self, lease: str, commands: list[str]) -> list[Outcome]:
        calls = [Call(lease_id=lease, tool="bash", args={"command": command}) for command in commands]
        return [outcome(result) for result in self._do(self._client.exec_batch(calls))]

    def write(self, lease: str, path: str, content: bytes) -> None:
        self._do(self._client.put_file(lease, path, content))

    def read(self, lease: str, path: str) -> bytes:
        return self._do(self._client.get_file(lease, path))

    def list(self, lease: str, path: str) -> list[tuple[str, int]]:
        return [(entry_name(entry.path), entry.size_bytes) for entry in self._do(self._client.list_files(lease, path))]

    def copy(self, lease: str, source: str, target: str) -> None:
        local = self._folder / "tree.tar.gz"
        self._do(self._client.get_archive_to(lease, source, local))
        self._do(self._client.put_archive(lease, target, local))

    def renew(self, lease: str, ttl_s: float) -> float:
        return self._do(self._client.renew([lease], ttl_s)).leases[0].expires_at

    def interrupt(self, lease: str, command: str, first_line: str) -> Outcome:
        async def run() -> Outcome:
            stream = self._client.exec_events(lease, "bash", {"command": command}, call_id="interrupted")
            first = await anext(stream)
            assert not isinstance(first, Result)
            assert first.text == first_line
            cancelled = await self._client.cancel(lease, "interrupted")
            rest = [item async for item in stream]
            assert rest[-1] == cancelled
            return outcome(cancelled)

        return self._do(run())

    def narrow(self, lease: str) -> bool:
        return self._do(self._client.narrow(lease, allow_network=False)).allow_network

    def release(self, lease: str) -> list[str]:
        return list(self._do(self._client.release([lease])).released)

    def close(self) -> None:
        self._do(self._client.aclose())
        self._runner.close()


WALKERS: Mapping[str, type[Curl] | type[CommandLineWalker] | type[Threads] | type[EventLoop]] = {
    "curl": Curl,
    "sandbox": CommandLineWalker,
    "SandboxClient": Threads,
    "AsyncSandboxClient": EventLoop,
}
