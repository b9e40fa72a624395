"""What environments hold: a slot for each trajectory, batches of tool calls over many slots. The run and its heartbeats are inside."""

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
from env_client.messages.message import text_problem
from env_client.messages.verbs import check_call
from env_client.retry import RetryPolicy
from env_client.values import AcquireOptions, Call, Fault, FileEntry, LeaseInfo, Reason, Result

#: As many calls a request as the service takes.
MAX_CALLS = 1000


@dataclass(frozen=True, slots=True)
class ExecutionResult:
    """What a tool call came to.

    Args:
        success: whether it did what it was asked to.
        output: what it wrote.
        error: one sentence on why it did not end by itself; empty if it did.
        metadata: `reason`, `fault`, `exit_code` and the rest of the service's result; `fault` `infra` is ours and never the model's.
    """

    success: bool
    output: str
    error: str
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def reason(self) -> str:
        """How it ended, such as `exit` or `timeout`."""
        return str(self.metadata["reason"])

    @property
    def fault(self) -> str:
        """Who is to blame: `none`, `policy`, `infra` or `ambiguous`."""
        return str(self.metadata["fault"])


class Slot:
    """One trajectory's slot, renewed until it is released.

    Args:
        lease: what holds it.
    """

    def __init__(self, lease: AsyncLease) -> None:
        self._lease = lease

    def __repr__(self) -> str:
        return f"<Slot {self.slot_id} of trajectory {self.trajectory_id!r}>"

    @property
    def lease(self) -> AsyncLease:
        """The lease, for what the backend has no method for."""
        return self._lease

    @property
    def info(self) -> LeaseInfo:
        """As the service last described it."""
        return self._lease.info

    @property
    def slot_id(self) -> str:
        """Which slot of which sandbox."""
        return self._lease.info.slot_id

    @property
    def trajectory_id(self) -> str | None:
        """Who holds it."""
        return self._lease.info.trajectory_id

    @property
    def workspace(self) -> str:
        """Its working folder, as its commands see it."""
        return self._lease.info.workspace

    @property
    def lost(self) -> ServiceError | None:
        """How it was lost; None while it is held, as far as anybody told."""
        return self._lease.lost


class RemoteToolBackend:
    """Slots of a sandbox service for the trajectories of one run: `async with RemoteToolBackend() as backend: slot = await backend.acquire("t-1")`.

    Args:
        url: the service's address; default `SANDBOX_URL`, else this machine's service.
        token: default `SANDBOX_TOKEN`, else that of this machine's service.
        pool: whose slots; default the service's default pool.
        run_id: the job that owns the slots; `close` releases all that it holds. Default: a new one.
        ttl_s: how long a slot outlives this process, in seconds.
        acquire_timeout_s: how long to queue for a slot; default the pool's.
        allow_network: may only narrow the pool's.
        cache: `rw` for the set-up cache of the run.
        retry: how patient to be.
        max_connections: how many requests may be under way.
        transport: what carries the requests instead of connections of the client's own.

    Raises:
        ServiceNotFound: nobody says where the service is.
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
        self._ended = False
        self.run_id = run_id or "run-" + secrets.token_hex(8)
        self._options: AcquireOptions = {
            "run_id": self.run_id,
            "ttl_s": ttl_s,
            "wait_s": acquire_timeout_s,
            "allow_network": allow_network,
            "cache": cache,
        }

    async def acquire(self, trajectory_id: str | None = None) -> Slot:
        """A slot for a trajectory, held until `release`.

        Raises:
            NoCapacity: none came free in time.
            ClientClosed: the backend was closed.
        """
        return (await self.acquire_group([trajectory_id]))[0]

    async def acquire_group(self, trajectory_ids: Sequence[str | None]) -> list[Slot]:
        """Slots for a group of trajectories: all of them or none."""
        self._check_open()
        options: AcquireOptions = {**self._options}
        named = [one for one in trajectory_ids if one is not None]
        if named and len(named) != len(trajectory_ids):
            raise ValueError("either all trajectories of a group have an id, or none has")
        if named:
            options["trajectory_ids"] = named
        leases = await self.client.hold(len(trajectory_ids), self.pool, **options)
        try:
            self._check_open()
        except ClientClosed:  # while this was under way, and perhaps after the run was released
            await self.client.give_back(leases)
            raise
        return [Slot(lease) for lease in leases]

    async def execute_batch(self, requests: Iterable[tuple[Slot, str, Mapping[str, Any]]], *, timeout_s: float | None = None) -> list[ExecutionResult]:
        """Run tool calls over many slots; those of one slot run in the order given, different slots side by side.

        Args:
            requests: slot, tool and arguments of each call.
            timeout_s: for each call; default the pool's.

        Returns:
            One result a call, in their order. What our side failed at is a result too, with fault `infra`; and what is wrong with a tool's name or
            its arguments, which a model has said, with fault `policy`.

        Raises:
            InvalidRequest: `timeout_s` is wrong, or more than the pool gives: nothing has run; or a tool's name is no text.
            ServiceError: the service refuses the batch as a whole, such as for its token.
        """
        results: list[ExecutionResult] = []
        calls = [slot.lease.call(tool, args, timeout_s=timeout_s) for slot, tool, args in requests]
        problems = [text_problem({"tool": call.tool, "args": call.args}) for call in calls]
        sent = [call for call, problem in zip(calls, problems, strict=True) if problem is None]
        for start in range(0, len(sent), MAX_CALLS):
            results += await self._batch(sent[start : start + MAX_CALLS])
        come = iter(results)
        return [next(come) if problem is None else no_text(call, problem) for call, problem in zip(calls, problems, strict=True)]

    async def execute(self, slot: Slot, tool: str, args: Mapping[str, Any], *, timeout_s: float | None = None) -> ExecutionResult:
        """Run one tool call."""
        return (await self.execute_batch([(slot, tool, args)], timeout_s=timeout_s))[0]

    async def narrow(self, slot: Slot, *, allow_network: bool | None = None, cache: str | None = None) -> None:
        """Take rights away from a slot after its set-up, for good: processes end, files stay."""
        await slot.lease.narrow(allow_network=allow_network, cache=cache)

    async def release(self, slot: Slot, reset_workspace: bool = True) -> None:
        """Give a slot back. One that was lost already is left at that.

        Args:
            slot: which.
            reset_workspace: False keeps its files, for a minute, for this run's next acquire.
        """
        await self.client.give_back([slot.lease], reset_workspace=reset_workspace)

    async def read_artifact(self, slot: Slot, path: str) -> bytes:
        """A file of a slot."""
        return await slot.lease.get_file(path)

    async def list_artifacts(self, slot: Slot, path: str = ".", *, recursive: bool = False) -> tuple[FileEntry, ...]:
        """The entries of a folder of a slot."""
        return await slot.lease.list_files(path, recursive=recursive)

    async def archive_artifacts(self, slot: Slot, path: str = ".") -> bytes:
        """A tree of a slot as a gzipped tar."""
        return await slot.lease.get_archive(path)

    def stream_artifacts(self, slot: Slot, path: str = ".") -> AsyncIterator[bytes]:
        """A tree of a slot as a gzipped tar, piece by piece."""
        return slot.lease.stream_archive(path)

    async def close(self) -> None:
        """Give back all slots of the run, and close the connections. From then on it refuses everything."""
        if self._ended:
            return
        self._ended = True
        try:
            await self.client.release(run_id=self.run_id)
        finally:
            await self.client.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        try:
            await self.close()
        except SandboxError as second:
            if error is None:
                raise
            error.add_note(f"the slots of run {self.run_id} could not be released either: {second}")

    def _check_open(self) -> None:
        if self._ended:
            raise ClientClosed(f"the backend of run {self.run_id} is closed, and its slots are given back: make a new one")

    async def _batch(self, calls: Sequence[Call]) -> list[ExecutionResult]:
        found: dict[int, ExecutionResult] = {}
        failure: TransportError | None = None
        try:
            async for index, result in self.client.exec_stream(calls):
                found[index] = execution_result(check_call(result, own_tool=False))
        except BadAnswer:
            raise
        except TransportError as error:
            failure = error
        return [found[index] if index in found else unanswered(call, failure) for index, call in enumerate(calls)]


def execution_result(result: Result) -> ExecutionResult:
    """A result of the service as environments take it."""
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


def no_text(call: Call, problem: str) -> ExecutionResult:
    """The result of a call that cannot be sent: half a character, as a model can write it with an escape in JSON, is the model's mistake."""
    metadata = {
        "reason": Reason.INVALID_ARGS.value,
        "fault": Fault.POLICY.value,
        "exit_code": None,
        "call_id": call.call_id,
        "lease_id": call.lease_id,
        "evidence": {"ran": False, "field": "args"},
    }
    return ExecutionResult(False, "", problem, metadata)


def unanswered(call: Call, error: TransportError | None) -> ExecutionResult:
    """The result of a call that got none: the service could not be reached, and the call may have run."""
    told = "" if error is None else error.detail
    metadata = {
        "reason": Reason.BACKEND_ERROR.value,
        "fault": Fault.INFRA.value,
        "exit_code": None,
        "call_id": call.call_id,
        "lease_id": call.lease_id,
        "may_have_run": True,
    }
    return ExecutionResult(False, "", f"the service gave no answer in time: {told}", metadata)
