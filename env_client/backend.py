"""The tool backend for RL environments: a slot for each trajectory, and batches of tool calls over many slots. It manages the run and the renewals."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import httpx

from env_client.client import DEFAULT_TTL_S, AsyncSandboxClient
from env_client.errors import BadAnswer, ClientClosed, SandboxError, ServiceError, TransportError
from env_client.leases import AsyncLease
from env_client.messages.calls import check_result
from env_client.messages.message import measure_args
from env_client.retry import RetryPolicy
from env_client.values import AcquireOptions, Call, Fault, FileEntry, LeaseInfo, Reason, Result

#: The most calls that the service accepts in one request.
MAX_CALLS_OF_REQUEST = 1000


@dataclass(frozen=True, slots=True)
class ExecutionResult:
    """The result of a tool call.

    Args:
        success: whether the call did what it was asked to do.
        output: what the call wrote.
        error: one sentence on why the call did not end by itself; empty if it did.
        metadata: `reason`, `fault`, `exit_code` and the other fields of the service's result. The fault `infra` is never the model's.
    """

    success: bool
    output: str
    error: str
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def reason(self) -> str:
        """How the call ended, such as `exit` or `timeout`."""
        return str(self.metadata["reason"])

    @property
    def fault(self) -> str:
        """Who is to blame: `none`, `policy`, `infra` or `ambiguous`."""
        return str(self.metadata["fault"])


class Slot:
    """The slot of one trajectory. Its lease is renewed until the slot is released.

    Args:
        lease: the lease of the slot.
    """

    def __init__(self, lease: AsyncLease) -> None:
        self._lease = lease

    def __repr__(self) -> str:
        return f"<Slot {self.slot_id} of trajectory {self.trajectory_id!r}>"

    @property
    def lease(self) -> AsyncLease:
        """The lease, for operations that the backend does not offer."""
        return self._lease

    @property
    def info(self) -> LeaseInfo:
        """The lease as the service last described it."""
        return self._lease.info

    @property
    def slot_id(self) -> str:
        """The id of the slot, which begins with the id of its sandbox."""
        return self._lease.info.slot_id

    @property
    def trajectory_id(self) -> str | None:
        """The trajectory that holds the slot."""
        return self._lease.info.trajectory_id

    @property
    def workspace(self) -> str:
        """The working folder of the slot, as its commands see it."""
        return self._lease.info.workspace

    @property
    def lost(self) -> ServiceError | None:
        """The error that says how the slot was lost; None as long as the client knows of no loss."""
        return self._lease.lost


class RemoteToolBackend:
    """Slots of a sandbox service for the trajectories of one run.

    Example: `async with RemoteToolBackend() as backend: slot = await backend.acquire("t-1")`.

    Args:
        url: the address of the service; default `SANDBOX_URL`, else the service of this machine.
        token: the token; default `SANDBOX_TOKEN`, else the token of this machine's service.
        pool: the pool; default the service's default pool.
        run_id: the run that owns the slots; `close` releases all of them. Default: a new id.
        ttl_s: how long a slot stays leased after this process has died, in seconds.
        acquire_timeout_s: how long an acquire may be queued, in seconds; default the pool's value.
        allow_network: False takes the network away; True cannot give a network that the pool denies.
        cache: `rw` for the set-up cache of the run.
        retry: how long requests are repeated.
        max_connections: how many requests may be in flight.
        transport: an httpx transport that carries the requests, instead of the client's own connections.

    Raises:
        ServiceNotFound: no address is given, and none is found.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        pool: str | None = None,
        run_id: str | None = None,
        ttl_s: float = DEFAULT_TTL_S,
        acquire_timeout_s: float | None = None,
        allow_network: bool | None = None,
        cache: str | None = None,
        retry: RetryPolicy | None = None,
        max_connections: int | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.client = AsyncSandboxClient(url, token, retry=retry, max_connections=max_connections, transport=transport)
        self.pool = pool
        self._closed = False
        self.run_id = run_id or "run-" + secrets.token_hex(8)
        self._options: AcquireOptions = {
            "run_id": self.run_id,
            "ttl_s": ttl_s,
            "wait_s": acquire_timeout_s,
            "allow_network": allow_network,
            "cache": cache,
        }

    async def acquire(self, trajectory_id: str | None = None) -> Slot:
        """Acquire a slot for a trajectory; it is held until `release`.

        Raises:
            NoCapacity: no slot became free in time.
            ClientClosed: the backend was closed.
        """
        return (await self.acquire_group([trajectory_id]))[0]

    async def acquire_group(self, trajectory_ids: Sequence[str | None]) -> list[Slot]:
        """Acquire slots for a group of trajectories: all of them or none.

        Raises:
            ValueError: some of the trajectories have an id and others have none.
            NoCapacity: the slots did not become free in time.
            ClientClosed: the backend was closed.
        """
        self._check_open()
        options: AcquireOptions = {**self._options}
        known_ids = [trajectory_id for trajectory_id in trajectory_ids if trajectory_id is not None]
        if known_ids and len(known_ids) != len(trajectory_ids):
            raise ValueError("either all trajectories of a group have an id, or none has")
        if known_ids:
            options["trajectory_ids"] = known_ids
        leases = await self.client.hold(len(trajectory_ids), self.pool, **options)
        try:
            self._check_open()
        except ClientClosed:  # `close` was called during the acquire, and may have released the run before these leases existed
            await self.client.give_back(leases)
            raise
        return [Slot(lease) for lease in leases]

    async def execute_batch(self, requests: Iterable[tuple[Slot, str, Mapping[str, Any]]], *, timeout_s: float | None = None) -> list[ExecutionResult]:
        """Run tool calls over many slots. Calls of one slot run in the given order; calls of different slots run concurrently.

        Args:
            requests: the slot, the tool and the arguments of each call.
            timeout_s: the timeout of each call, in seconds; default the pool's.

        Returns:
            One result for each call, in the same order. A failure of the service or the network is a result with the fault `infra`. A wrong tool name or
            wrong arguments, which a model may have written, are a result with the fault `policy`.

        Raises:
            InvalidRequest: `timeout_s` is wrong or above the pool's maximum, or a tool name is not text. Nothing has run.
            ServiceError: the service refuses the whole batch, for example because of the token.
        """
        calls = [slot.lease.call(tool, args, timeout_s=timeout_s) for slot, tool, args in requests]
        problems = [measure_args([call.tool, call.args])[1] for call in calls]
        valid_calls = [call for call, problem in zip(calls, problems, strict=True) if problem is None]
        results: list[ExecutionResult] = []
        for first in range(0, len(valid_calls), MAX_CALLS_OF_REQUEST):
            results += await self._execute_one_request(valid_calls[first : first + MAX_CALLS_OF_REQUEST])
        remaining = iter(results)
        return [next(remaining) if problem is None else invalid_args_result(call, problem) for call, problem in zip(calls, problems, strict=True)]

    async def execute(self, slot: Slot, tool: str, args: Mapping[str, Any], *, timeout_s: float | None = None) -> ExecutionResult:
        """Run one tool call; see `execute_batch`."""
        return (await self.execute_batch([(slot, tool, args)], timeout_s=timeout_s))[0]

    async def narrow(self, slot: Slot, *, allow_network: bool | None = None, cache: str | None = None, read_only: Sequence[str] | None = None) -> None:
        """Take rights away from a slot after its set-up, for good. The processes of the slot end; its files stay."""
        await slot.lease.narrow(allow_network=allow_network, cache=cache, read_only=read_only)

    async def release(self, slot: Slot, reset_workspace: bool = True) -> None:
        """Release a slot. A slot that was lost already is no error.

        Args:
            slot: the slot.
            reset_workspace: False keeps the files for one minute, for the next acquire of this run.
        """
        await self.client.give_back([slot.lease], reset_workspace=reset_workspace)

    async def read_artifact(self, slot: Slot, path: str) -> bytes:
        """Read a file of a slot."""
        return await slot.lease.get_file(path)

    async def list_artifacts(self, slot: Slot, path: str = ".", *, recursive: bool = False) -> tuple[FileEntry, ...]:
        """List a folder of a slot."""
        return await slot.lease.list_files(path, recursive=recursive)

    async def archive_artifacts(self, slot: Slot, path: str = ".") -> bytes:
        """Read a folder of a slot as a gzipped tar."""
        return await slot.lease.get_archive(path)

    def stream_artifacts(self, slot: Slot, path: str = ".") -> AsyncIterator[bytes]:
        """Yield a folder of a slot as a gzipped tar in chunks."""
        return slot.lease.stream_archive(path)

    async def close(self) -> None:
        """Release all slots of the run and close the connections. Later requests raise `ClientClosed`."""
        if self._closed:
            return
        self._closed = True
        try:
            await self.client.release(run_id=self.run_id)
        finally:
            await self.client.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        try:
            await self.close()
        except SandboxError as release_error:
            if error is None:
                raise
            error.add_note(f"the slots of run {self.run_id} could not be released either: {release_error}")

    def _check_open(self) -> None:
        if self._closed:
            raise ClientClosed(f"the backend of run {self.run_id} is closed and its slots are given back; create a new backend")

    async def _execute_one_request(self, calls: Sequence[Call]) -> list[ExecutionResult]:
        results: dict[int, ExecutionResult] = {}
        failure: TransportError | None = None
        try:
            async for index, result in self.client.exec_stream(calls):
                results[index] = execution_result(check_result(result, tool_from_program=False))
        except BadAnswer:
            raise
        except TransportError as error:
            failure = error
        return [results[index] if index in results else no_response_result(call, failure) for index, call in enumerate(calls)]


def execution_result(result: Result) -> ExecutionResult:
    """Convert a result of the service into an `ExecutionResult`."""
    metadata = {
        **result.metadata,
        "reason": result.reason,
        "fault": result.fault,
        "exit_code": result.exit_code,
        "call_id": result.call_id,
        "lease_id": result.lease_id,
        "duration_s": result.duration_s,
        "cpu_s": result.cpu_s,
        "max_rss_bytes": result.max_rss_bytes,
        "output_bytes": result.output_bytes,
        "truncated": result.truncated,
    }
    return ExecutionResult(result.success, result.output, result.error, metadata)


def invalid_args_result(call: Call, problem: str) -> ExecutionResult:
    """Create the result of a call that did not run because its arguments cannot be sent; `problem` is one sentence on why."""
    metadata = {
        "reason": Reason.INVALID_ARGS.value,
        "fault": Fault.POLICY.value,
        "exit_code": None,
        "call_id": call.call_id,
        "lease_id": call.lease_id,
        "evidence": {"ran": False, "field": "args"},
    }
    return ExecutionResult(False, "", problem, metadata)


def no_response_result(call: Call, error: TransportError | None) -> ExecutionResult:
    """Create the result of a call whose response did not arrive; the call may have run."""
    detail = "" if error is None else error.detail
    metadata = {
        "reason": Reason.BACKEND_ERROR.value,
        "fault": Fault.INFRA.value,
        "exit_code": None,
        "call_id": call.call_id,
        "lease_id": call.lease_id,
        "may_have_run": True,
    }
    return ExecutionResult(False, "", f"the service sent no response in time: {detail}", metadata)
