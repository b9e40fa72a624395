"""Gathers the tool calls of all trajectories of a process into exec-batches, so that many trajectories cost few requests.

A request carries one call of each lease, and its answer is a stream: each result is given to its trajectory as soon as it arrives.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from env_client.backend import MAX_CALLS_OF_REQUEST, ExecutionResult, execution_result, invalid_args_result
from env_client.client import AsyncSandboxClient
from env_client.errors import (
    CallNotFound,
    ClientClosed,
    Forbidden,
    InvalidRequest,
    LeaseLost,
    LeaseNotFound,
    PayloadTooLarge,
    SandboxError,
    TransportError,
    Unauthorized,
)
from env_client.messages.calls import check_result
from env_client.messages.message import measure_args
from env_client.values import Call, Fault, Reason

log = logging.getLogger("env_client")

DEFAULT_WINDOW_MS, DEFAULT_MAX_BATCH_SIZE = 20.0, 200
#: The arguments of all calls of one request, in bytes of JSON. The service refuses a body of more than 32 MiB unless it is set otherwise.
MAX_REQUEST_BYTES = 4 << 20
#: The output that all calls of one request may ask for, in bytes. The service allows 256 MiB unless it is set otherwise.
MAX_REQUEST_OUTPUT_BYTES = 128 << 20
#: Calls with longer arguments, in bytes of JSON, or deeper ones have a request of their own: if the service refuses it, no other call is affected.
MAX_SHARED_CALL_BYTES, MAX_SHARED_CALL_DEPTH = 64 << 10, 8
DEFAULT_OUTPUT_LIMIT_BYTES = 50_000  # of the contract
#: How long `aclose` waits until the service has ended the calls that still run, in seconds.
CLOSE_TIMEOUT_S = 5.0
#: The first and the longest delay before a cancellation is repeated because its call has not reached the service yet, in seconds.
CANCEL_DELAYS_S = (0.02, 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class GathererStatistics:
    """What a gatherer has done so far.

    Args:
        call_count: the calls that were submitted and could be sent.
        sent_count: the calls that were sent.
        answered_count: the calls that were sent and have their result, or an error.
        request_count: the requests that carried them.
        cancelled_count: the calls whose trajectory was cancelled before their result arrived.
        waited_s: how long all calls together waited before they were sent, in seconds.
    """

    call_count: int = 0
    sent_count: int = 0
    answered_count: int = 0
    request_count: int = 0
    cancelled_count: int = 0
    waited_s: float = 0.0


@dataclass(eq=False, kw_only=True, slots=True)
class _GatheredCall:
    """A submitted call. `request` is the task that carries it, None while it waits."""

    call: Call
    tool_from_program: bool
    args_bytes: int
    needs_own_request: bool
    submitted_s: float
    future: asyncio.Future[ExecutionResult]
    request: asyncio.Task[None] | None = None
    answered: bool = False


class CallGatherer:
    """Sends the tool calls of concurrent trajectories in common requests.

    A call is sent at once if the calls that were sent last are answered, or were sent more than `window_ms` ago. Otherwise it waits for that, or until
    `max_batch_size` calls wait, whichever comes first. Calls of one lease that are submitted at the same time run side by side, in requests of their
    own: await the first one where the order matters.

    A gatherer belongs to the event loop in which it is first used.

    Args:
        client: the client that sends the requests. The gatherer does not close it.
        window_ms: how long a call waits at most before it is sent, in milliseconds.
        max_batch_size: how many calls one request carries at most, 1 to 1,000.

    Raises:
        ValueError: `window_ms` is negative, or `max_batch_size` is out of range.
    """

    def __init__(self, client: AsyncSandboxClient, *, window_ms: float = DEFAULT_WINDOW_MS, max_batch_size: int = DEFAULT_MAX_BATCH_SIZE) -> None:
        if not window_ms >= 0:
            raise ValueError(f"window_ms: must be 0 or more milliseconds, not {window_ms!r}")
        if not 1 <= max_batch_size <= MAX_CALLS_OF_REQUEST:
            raise ValueError(f"max_batch_size: must be from 1 to {MAX_CALLS_OF_REQUEST}, not {max_batch_size!r}")
        self._client = client
        self._window_s = window_ms / 1000
        self._max_batch_size = max_batch_size
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: dict[_GatheredCall, None] = {}  # in the order of submission
        self._in_flight: set[_GatheredCall] = set()
        self._last_sent: set[_GatheredCall] = set()  # those of the calls that were sent last that are not answered
        self._last_sent_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._requests: set[asyncio.Task[None]] = set()
        self._cancellations: set[asyncio.Task[None]] = set()
        self._closed = False
        #: What the gatherer has done so far.
        self.statistics = GathererStatistics()

    async def execute(self, call: Call, *, tool_from_program: bool = False) -> ExecutionResult:
        """Run one call and return its result. If the caller is cancelled, the call is ended at the service, and other calls are not affected.

        Args:
            call: the call, for example of `lease.call`.
            tool_from_program: whether the program, and not a model, chose the tool. An unknown tool is then an error instead of a result.

        Returns:
            The result. A failure of the service or the network is a result with the fault `infra`. Wrong arguments, and a wrong tool that a model has
            chosen, are a result with the fault `policy`.

        Raises:
            InvalidRequest: the program made a mistake, such as a `timeout_s` above the pool's maximum, or arguments that JSON cannot express.
            Unauthorized, Forbidden: the service does not accept the token for this.
            ClientClosed: the gatherer or its client was closed.
            RuntimeError: the gatherer is used in another event loop than before.
        """
        loop = self._check_usable()
        args_bytes, problem = measure_args(call.args)
        if problem is not None:
            return invalid_args_result(call, problem)
        gathered = _GatheredCall(
            call=call,
            tool_from_program=tool_from_program,
            args_bytes=args_bytes,
            needs_own_request=args_bytes > MAX_SHARED_CALL_BYTES or is_nested_deeper(call.args, MAX_SHARED_CALL_DEPTH),
            submitted_s=loop.time(),
            future=loop.create_future(),
        )
        self._count(call_count=1)
        self._waiting[gathered] = None
        wait_s = self._last_sent_s + self._window_s - loop.time() if self._last_sent else 0.0
        if wait_s <= 0 or len(self._waiting) >= self._max_batch_size:
            self._send_waiting()
        elif self._timer is None:
            self._timer = loop.call_later(wait_s, self._send_waiting)
        try:
            return await gathered.future
        except asyncio.CancelledError:
            self._end_call(gathered)
            raise

    async def aclose(self, *, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """End the calls that wait or run, within `timeout_s` seconds; their callers get `ClientClosed`. Calls that are submitted later get it, too."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for gathered in [*self._waiting, *self._in_flight]:
            if not gathered.future.done():
                gathered.future.set_exception(_closed_error())
                self._end_call(gathered)
        tasks = {*self._cancellations, *self._requests}
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    def _count(self, **increments: float) -> None:
        sums = {name: getattr(self.statistics, name) + increment for name, increment in increments.items()}
        self.statistics = dataclasses.replace(self.statistics, **sums)

    def _check_usable(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        if self._loop is not loop:
            raise RuntimeError("a CallGatherer belongs to the event loop in which it was first used; create one for each event loop")
        if self._closed:
            raise _closed_error()
        return loop

    def _send_waiting(self) -> None:
        """Send all calls that wait."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._loop is None or not self._waiting:
            return
        waiting = list(self._waiting)
        self._waiting.clear()
        self._last_sent, self._last_sent_s = set(waiting), self._loop.time()
        self._count(sent_count=len(waiting), waited_s=sum(self._last_sent_s - gathered.submitted_s for gathered in waiting))
        for request in split_into_requests(waiting, self._max_batch_size):
            self._in_flight.update(request)
            task = self._loop.create_task(self._send_request(request))
            for gathered in request:
                gathered.request = task
            self._requests.add(task)
            task.add_done_callback(self._requests.discard)

    async def _send_request(self, calls: list[_GatheredCall]) -> None:
        """Send calls in one request and give each its result. Whatever happens, every one of them gets a result or an error."""
        self._count(request_count=1)
        try:
            await self._stream_results(calls)
        except (InvalidRequest, PayloadTooLarge) as error:
            await self._send_divided([gathered for gathered in calls if not gathered.answered], error)
        except (Unauthorized, Forbidden, ClientClosed) as error:
            self._fail_calls(calls, error)
        except SandboxError as error:
            for gathered in calls:
                self._answer_call(gathered, service_failure_result(gathered.call, error))
        except asyncio.CancelledError:  # by `aclose`
            self._fail_calls(calls, _closed_error())
            raise
        except Exception as error:  # a mistake in the client: no caller may wait for ever
            self._fail_calls(calls, error)

    async def _stream_results(self, calls: list[_GatheredCall]) -> None:
        async for index, result in self._client.exec_stream([gathered.call for gathered in calls]):
            gathered = calls[index]
            try:
                checked = check_result(result, tool_from_program=gathered.tool_from_program)
            except InvalidRequest as error:
                self._fail_calls([gathered], error)
            else:
                self._answer_call(gathered, execution_result(checked))

    async def _send_divided(self, calls: list[_GatheredCall], error: InvalidRequest | PayloadTooLarge) -> None:
        """Send the calls of a request that was refused as a whole in two halves, until the call is alone because of which it was refused."""
        if len(calls) > 1:
            middle = len(calls) // 2
            await asyncio.gather(self._send_request(calls[:middle]), self._send_request(calls[middle:]))
        elif error.status is None:  # the client could not build the request
            self._fail_calls(calls, error)
        else:  # all other fields of the request are the client's own, so it is something in the arguments, such as their depth
            for gathered in calls:
                self._answer_call(gathered, invalid_args_result(gathered.call, f"args: {error.detail}"))

    def _answer_call(self, gathered: _GatheredCall, result: ExecutionResult) -> None:
        if not gathered.answered and not gathered.future.done():
            gathered.future.set_result(result)
        self._record_answer(gathered)

    def _fail_calls(self, calls: Iterable[_GatheredCall], error: BaseException) -> None:
        for gathered in calls:
            if not gathered.answered and not gathered.future.done():
                # Each caller gets an error of its own, because callers add notes to it.
                gathered.future.set_exception(copy.copy(error) if isinstance(error, SandboxError) else error)
            self._record_answer(gathered)

    def _record_answer(self, gathered: _GatheredCall) -> None:
        if gathered.answered:
            return
        gathered.answered = True
        self._in_flight.discard(gathered)
        self._last_sent.discard(gathered)
        self._count(answered_count=1)
        if not self._last_sent and not self._closed:
            self._send_waiting()

    def _end_call(self, gathered: _GatheredCall) -> None:
        """End a call whose caller waits no longer."""
        if gathered.answered:
            return
        self._count(cancelled_count=1)
        if gathered.request is None:
            self._waiting.pop(gathered, None)
            return
        task = asyncio.get_running_loop().create_task(self._cancel_at_service(gathered, gathered.request))
        self._cancellations.add(task)
        task.add_done_callback(self._cancellations.discard)

    async def _cancel_at_service(self, gathered: _GatheredCall, request: asyncio.Task[None]) -> None:
        """Ask the service to end a call. A call that has not reached the service yet is ended as soon as it has."""
        delay_s, max_delay_s = CANCEL_DELAYS_S
        while not gathered.answered:
            try:
                await self._client.cancel(gathered.call.lease_id, gathered.call.call_id or "")
            except CallNotFound:
                await asyncio.wait({request}, timeout=delay_s)
                delay_s = min(max_delay_s, 2 * delay_s)
            except (LeaseLost, LeaseNotFound, ClientClosed):
                return  # the call ends with its lease
            except SandboxError as error:
                log.warning("call %s could not be cancelled; it runs until its timeout or the end of its lease: %s", gathered.call.call_id, error)
                return
            else:
                return


def split_into_requests(calls: Iterable[_GatheredCall], max_batch_size: int) -> list[list[_GatheredCall]]:
    """Divide calls into requests of at most `max_batch_size`. No request has two calls of one lease: the service would run them one after another."""
    requests: list[list[_GatheredCall]] = []
    shared: list[_RequestRoom] = []
    for gathered in calls:
        if gathered.needs_own_request:
            requests.append([gathered])
            continue
        room = next((room for room in shared if room.has_room(gathered, max_batch_size)), None)
        if room is None:
            room = _RequestRoom()
            shared.append(room)
            requests.append(room.calls)
        room.add_call(gathered)
    return requests


class _RequestRoom:
    """A request that is being composed."""

    def __init__(self) -> None:
        self.calls: list[_GatheredCall] = []
        self._lease_ids: set[str] = set()
        self._args_bytes = 0
        self._output_bytes = 0

    def has_room(self, gathered: _GatheredCall, max_batch_size: int) -> bool:
        return (
            len(self.calls) < max_batch_size
            and gathered.call.lease_id not in self._lease_ids
            and self._args_bytes + gathered.args_bytes <= MAX_REQUEST_BYTES
            and self._output_bytes + _output_limit_bytes(gathered.call) <= MAX_REQUEST_OUTPUT_BYTES
        )

    def add_call(self, gathered: _GatheredCall) -> None:
        self.calls.append(gathered)
        self._lease_ids.add(gathered.call.lease_id)
        self._args_bytes += gathered.args_bytes
        self._output_bytes += _output_limit_bytes(gathered.call)


def is_nested_deeper(value: Any, depth: int) -> bool:
    """Return whether a JSON value has more than `depth` levels of objects and lists."""
    if not isinstance(value, Mapping | list | tuple):
        return False
    members = value.values() if isinstance(value, Mapping) else value
    return depth == 0 or any(is_nested_deeper(member, depth - 1) for member in members)


def service_failure_result(call: Call, error: SandboxError) -> ExecutionResult:
    """Create the result of a call that the service could not run, or whose result did not arrive; `error` is that of the last attempt."""
    may_have_run = bool(error.extra.get("may_have_run", isinstance(error, TransportError)))
    metadata = _metadata(call, Reason.BACKEND_ERROR, Fault.INFRA, may_have_run=may_have_run)
    return ExecutionResult(False, "", f"there is no result from the service: {error.detail}", metadata)


def _metadata(call: Call, reason: Reason, fault: Fault, **facts: Any) -> dict[str, Any]:
    return {"reason": reason.value, "fault": fault.value, "exit_code": None, "call_id": call.call_id, "lease_id": call.lease_id, **facts}


def _output_limit_bytes(call: Call) -> int:
    return DEFAULT_OUTPUT_LIMIT_BYTES if call.output_limit_bytes is None else call.output_limit_bytes


def _closed_error() -> ClientClosed:
    return ClientClosed("the gatherer was closed; its calls were ended")
