"""Both clients on the real service: they do the same things and get the same answers."""

from __future__ import annotations

import asyncio
import contextlib
import io
import tarfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from env_client import AsyncSandboxClient, Call, SandboxClient, errors
from tests.support.both_clients import KINDS, Face
from tests.support.service import Service


def make_client(kind: str, service: Service, runner: asyncio.Runner) -> Face:
    made = SandboxClient(service.url, service.token) if kind == "sync" else AsyncSandboxClient(service.url, service.token)
    return Face(made, runner)


def close_client(client: Face) -> None:
    client.close() if isinstance(client.inner, SandboxClient) else client.aclose()


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as made:
        yield made


@pytest.fixture(params=KINDS)
def client(request: pytest.FixtureRequest, service: Service, runner: asyncio.Runner) -> Iterator[Face]:
    made = make_client(request.param, service, runner)
    yield made
    close_client(made)


def packed(**files: bytes) -> bytes:
    """A gzipped tar of some files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def names_in(archive: bytes) -> set[str]:
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as tar:
        return {member.name.removeprefix("./") for member in tar if member.isfile()}


def ten_things(client: Face, folder: Path) -> list[Any]:
    """What a newcomer does with a client, and what of the answers does not differ from one time to the next."""
    seen: list[Any] = []
    with client.lease(run_id="ten-things", trajectory_id="t-1", ttl_s=60, wait_s=30, labels={"kind": "test"}) as lease:
        info = client.lease_info(lease.lease_id)
        seen.append(("lease", info.state, info.run_id, info.trajectory_id, dict(info.labels), info.workspace, info.pool))
        seen.append(("leases", [info.lease_id == lease.lease_id for info in client.iter_leases(run_id="ten-things")]))
        hello = lease.bash("echo hello; echo there >&2; exit 3", cwd="/tmp", timeout_s=20)
        seen.append(("bash", hello.output, hello.exit_code, hello.success, hello.reason, hello.fault))
        lease.put_file("dir/a.bin", b"\x00\xff" * 1000, mode=0o640)
        seen.append(("file", lease.get_file("dir/a.bin") == b"\x00\xff" * 1000, lease.get_file_to("dir/a.bin", folder / "a"), (folder / "a").stat().st_size))
        lease.put_archive("tree", packed(x=b"1", y=b"22"))
        seen.append(("list", sorted((entry.path, entry.type, entry.size_bytes) for entry in lease.list_files("tree", recursive=True))))
        seen.append(("archive", names_in(lease.get_archive("tree")), names_in(b"".join(lease.stream_archive("tree")))))
        calls = [lease.call("read_file", {"path": "tree/x"}), lease.call("read_file", {"path": "none"}), lease.call("nonsense", {})]
        results = client.exec_batch(calls)
        seen.append(("batch", [(result.success, result.reason, result.call_id == call.call_id) for call, result in zip(calls, results, strict=True)]))
        seen.append(("stream", [(index, result.reason) for index, result in client.exec_stream(calls)]))
        seen.append(("renew", lease.renew(120).lease_id == lease.lease_id))
    released = client.release([lease.lease_id])
    seen.append(("release", list(released.released) == [lease.lease_id], released.unknown))
    seen.append(("pools", [(pool.name, pool.spec["backend"]) for pool in client.pools()], client.pool("default").name))
    seen.append(("health", client.healthz()["status"], client.readyz().ready))
    return seen


def test_both_do_the_same_ten_things_and_get_the_same_answers(service: Service, runner: asyncio.Runner, tmp_path: Path) -> None:
    answers = {}
    for kind in KINDS:
        client = make_client(kind, service, runner)
        answers[kind] = ten_things(client, tmp_path)
        close_client(client)

    assert answers["sync"] == answers["async"]
    seen = {name: rest for name, *rest in answers["sync"]}
    assert seen["bash"] == ["hello\nthere\n", 3, False, "exit", "none"]
    assert seen["file"] == [True, 2000, 2000]
    assert seen["archive"] == [{"x", "y"}, {"x", "y"}]
    assert seen["batch"] == [[(True, "exit", True), (False, "tool_error", True), (False, "invalid_args", True)]]
    assert seen["stream"] == [[(0, "exit"), (1, "tool_error"), (2, "invalid_args")]]
    assert seen["lease"][0] == "held"
    assert seen["release"] == [True, ()]
    assert seen["health"] == ["ok", True]


def test_a_call_sent_again_ran_once(client: Face) -> None:
    with client.lease(wait_s=30) as lease:
        call = lease.call("bash", {"command": "echo once >> ran"})
        first, second = client.exec_batch([call]), client.exec_batch([call])

        assert first == second
        assert lease.get_file("ran") == b"once\n"


def test_who_got_a_call_wrong_is_who_hears_of_it(client: Face) -> None:
    with client.lease(wait_s=30) as lease:
        for made in (lambda: lease.bash("true", timeout_s=1e6), lambda: lease.exec("bash", {"command": "true"}, encoding="latin-1")):
            with pytest.raises(errors.InvalidRequest, match=r"^(timeout_s|encoding): "):
                made()
        for made in (lambda: lease.exec("bsah", {}), lambda: list(lease.exec_events("bsah", {}))):
            with pytest.raises(errors.InvalidRequest, match="no tool 'bsah'"):
                made()
        calls = [lease.call("bsah", {}), lease.call("bash", []), lease.call("bash", {"command": 7}), lease.call("bash", {"command": "true"}, timeout_s=1e6)]
        results = [*client.exec_batch(calls), lease.exec("bash", {"command": 7}), lease.bash("a\0b")]

    assert [result.reason for result in results] == ["invalid_args"] * 6
    assert [result.fault for result in results] == ["policy", "policy", "policy", "infra", "policy", "policy"]


def test_an_acquire_sent_again_has_the_same_leases(client: Face) -> None:
    key = f"again-{uuid.uuid4()}"
    first, second = (client.acquire(count=2, request_key=key, run_id=key, wait_s=30) for _ in range(2))
    with pytest.raises(errors.CallConflict):
        client.acquire(count=1, request_key=key, run_id=key, wait_s=30)
    client.release(run_id=key)

    assert [info.lease_id for info in first.leases] == [info.lease_id for info in second.leases]
    with pytest.raises(errors.LeaseLost):
        client.acquire(count=2, request_key=key, run_id=key, wait_s=30)


@pytest.mark.parametrize(
    ("verb", "arguments", "error", "status"),
    [
        ("acquire", {"pool": "none-such"}, errors.PoolNotFound, 404),
        ("acquire", {"count": 1000}, errors.InvalidRequest, 422),
        ("acquire", {"ttl_s": 0}, errors.InvalidRequest, 422),
        ("exec_batch", {"calls": []}, errors.InvalidRequest, 422),
        ("exec", {"lease_id": "none-such", "tool": "bash", "args": {"command": "true"}}, errors.LeaseNotFound, 404),
        ("lease_info", {"lease_id": "none-such"}, errors.LeaseNotFound, 404),
        ("get_file", {"lease_id": "none-such", "path": "x"}, errors.LeaseNotFound, 404),
        ("pool", {"name": "none-such"}, errors.PoolNotFound, 404),
        ("release", {}, errors.InvalidRequest, 422),
    ],
)
def test_errors_are_the_class_of_their_code(client: Face, verb: str, arguments: dict[str, Any], error: type[errors.ServiceError], status: int) -> None:
    with pytest.raises(error) as caught:
        getattr(client, verb)(**arguments)

    assert (type(caught.value), caught.value.status) == (error, status)
    assert caught.value.request_id


def test_errors_of_files_are_the_class_of_their_code(client: Face) -> None:
    with client.lease(wait_s=30) as lease:
        with pytest.raises(errors.FileNotFound):
            lease.get_file("none-such")
        with pytest.raises(errors.FileError):
            lease.get_file(".")
        with pytest.raises(errors.InvalidRequest):
            lease.get_file("../../etc/passwd")


def test_a_wrong_token_is_told(service: Service) -> None:
    with SandboxClient(service.url, "wrong") as client, pytest.raises(errors.Unauthorized):
        client.pools()


def test_a_lease_that_ended_is_surfaced(client: Face) -> None:
    with client.lease(wait_s=30) as lease:
        client.release([lease.lease_id])
        with pytest.raises(errors.LeaseLost):
            lease.bash("true")
        (result,) = client.exec_batch([Call(lease_id=lease.lease_id, tool="bash", args={"command": "true"})])

        assert (result.reason, result.fault) == ("lease_lost", "ambiguous")
        assert lease.lost.code == "lease_lost"


def test_the_heartbeat_finds_out_that_a_lease_ended(client: Face) -> None:
    with client.lease(wait_s=30, ttl_s=60) as lease, client.lease(wait_s=30, ttl_s=60) as other:
        client.release([lease.lease_id])
        heartbeat = Face(client.inner._heartbeat, client.runner)
        later = heartbeat.inner._clock() + 20
        heartbeat.inner._clock = lambda: later
        heartbeat.renew_due_leases()

        assert lease.lost.code == "lease_lost"
        assert (other.lost, other.renewal_error) == (None, None)


def test_cancelling_a_call_that_ended_has_its_result(client: Face) -> None:
    with client.lease(wait_s=30) as lease:
        ended = lease.exec("bash", {"command": "true"}, call_id="done")

        assert lease.cancel("done") == ended


async def test_a_cancelled_call_says_so(service: Service) -> None:
    async with AsyncSandboxClient(service.url, service.token) as client, client.lease(wait_s=30) as lease:
        running = asyncio.create_task(lease.bash("echo begun; sleep 60", call_id="long", timeout_s=60))
        told = None
        while told is None:
            with contextlib.suppress(errors.CallNotFound):  # the service has not seen it yet
                told = await lease.cancel("long")

        assert (told.reason, told.fault, told.exit_code) == ("cancelled", "none", None)
        assert await running == told


async def test_many_at_a_time_share_few_connections_even_if_some_give_up(service: Service) -> None:
    async with AsyncSandboxClient(service.url, service.token, max_connections=4) as client, client.gang(4, wait_s=30) as leases:
        impatient = [asyncio.create_task(lease.bash("sleep 60", timeout_s=60)) for lease in leases]
        await asyncio.wait(impatient, timeout=0.05)
        for task in impatient:
            task.cancel()
        results = await asyncio.gather(*[lease.bash(f"echo {number}") for number in range(10) for lease in leases])

        assert [result.output for result in results] == [f"{number}\n" for number in range(10) for _ in leases]
        assert all(task.cancelled() for task in impatient)
