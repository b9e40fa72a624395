"""How much the responses in progress may hold, in memory and in files. What a request may need is reserved before the first of its calls runs.

In memory, each call reserves `CALL_BYTES` for its result without the output. Nothing is reserved for the output, because few calls write as much as
they may: an output of up to `LARGE_OUTPUT_BYTES` stays in memory if there is room when it arrives, and goes to a file otherwise. Outputs may take
half of the memory, so that responses that nobody reads leave room for new requests.
In files, each call reserves its `output_limit_bytes` if that is more than `LARGE_OUTPUT_BYTES`; what the call did not write is released with its result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sandbox_server.core.errors import InvalidRequest, QuotaExceeded
from sandbox_server.core.execution import LARGE_OUTPUT_BYTES, Result, ToolCall
from sandbox_server.dispatch.limits.room_queue import TENANT_SHARE, QueueFull, RoomQueue

CALL_BYTES = 4096
"""The size of the result of one call without its output."""
STREAM_BYTES = 128 << 10
"""The memory of a response that is sent in pieces: the pieces in progress, and what the server and the connection buffer."""
OUTPUT_SHARE = 0.5
"""The share of the memory that outputs may take."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponseLimits:
    """How much all responses may hold, by the names of the settings.

    Args:
        memory_bytes: `limits.answer_memory_bytes`.
        file_bytes: `limits.answer_file_bytes`.
        wait_s: how long a request waits for room, in seconds (`limits.answer_wait_s`).
    """

    memory_bytes: int = 256 << 20
    file_bytes: int = 2 << 30
    wait_s: float = 10


@dataclass(slots=True)
class _Usage:
    memory_bytes: int = 0
    file_bytes: int = 0


@dataclass(slots=True, eq=False)
class ResponseReservation:
    """What one request holds of the budget. The holder releases it when the response has ended, successfully or not.

    Args:
        budget: the budget that it is a part of.
        tenant: the tenant of the request.
        memory_bytes: how much is reserved in memory.
        file_bytes: how much is reserved in files.
        is_released: whether everything has been released.
    """

    budget: ResponseBudget
    tenant: str
    memory_bytes: int
    file_bytes: int
    is_released: bool = False

    def try_reserve_output(self, size_bytes: int) -> bool:
        """Reserve memory for an output, if there is room for it. Returns whether the output may stay in memory.

        A reservation that is released counts nothing, because its request keeps no results.

        Args:
            size_bytes: the size of the output.
        """
        if self.is_released or not size_bytes:
            return True
        if size_bytes > LARGE_OUTPUT_BYTES or not self.budget.has_room_for_output(self.tenant, size_bytes):
            return False
        self.memory_bytes += size_bytes
        self.budget.add_usage(self.tenant, memory_bytes=size_bytes)
        return True

    def release_unwritten_output(self, call: ToolCall, result: Result) -> None:
        """Release what a call had reserved in files and did not write.

        Args:
            call: the call.
            result: its result.
        """
        written = result.output_file.size_bytes if result.output_file is not None else 0
        self._release_bytes(file_bytes=max(0, _file_bytes(call) - written))

    def release_sent_result(self, result: Result) -> None:
        """Release what a result held, after it was sent."""
        written = result.output_file.size_bytes if result.output_file is not None else 0
        self._release_bytes(memory_bytes=CALL_BYTES + result.held_bytes, file_bytes=written)

    def release(self) -> None:
        """Release everything. A second release does nothing."""
        self._release_bytes(memory_bytes=self.memory_bytes, file_bytes=self.file_bytes)
        self.is_released = True

    def _release_bytes(self, memory_bytes: int = 0, file_bytes: int = 0) -> None:
        if self.is_released:
            return
        memory_bytes, file_bytes = min(memory_bytes, self.memory_bytes), min(file_bytes, self.file_bytes)
        if memory_bytes or file_bytes:
            self.memory_bytes -= memory_bytes
            self.file_bytes -= file_bytes
            self.budget.remove_usage(self.tenant, memory_bytes=memory_bytes, file_bytes=file_bytes)


def _file_bytes(call: ToolCall) -> int:
    return call.output_limit_bytes if call.output_limit_bytes > LARGE_OUTPUT_BYTES else 0


@dataclass(slots=True)
class ResponseBudget:
    """The budget of all responses, of which one tenant may have half.

    Args:
        limits: how much all responses may hold.
    """

    limits: ResponseLimits = field(default_factory=ResponseLimits)
    _total: _Usage = field(default_factory=_Usage)
    _usage_by_tenant: dict[str, _Usage] = field(default_factory=dict)
    _queue: RoomQueue[ResponseReservation] = field(init=False)

    def __post_init__(self) -> None:
        self._queue = RoomQueue(self._fits, self._admit)

    async def reserve(self, tenant: str, items: Sequence[ToolCall | Result]) -> ResponseReservation:
        """Reserve what the response to these calls may need. Waits for room where necessary, behind the other requests of the tenant.

        Args:
            tenant: the tenant that sends the request.
            items: the calls, and the results that are known already.

        Raises:
            InvalidRequest: the response may need more than a tenant can ever have.
            QuotaExceeded: there was no room within `limits.answer_wait_s`.
        """
        calls = [item for item in items if isinstance(item, ToolCall)]
        file_bytes = sum(_file_bytes(call) for call in calls)
        reservation = ResponseReservation(self, tenant, CALL_BYTES * len(items) + (self._stream_bytes() if file_bytes else 0), file_bytes)
        return await self._obtain(reservation)

    def _stream_bytes(self) -> int:
        """`STREAM_BYTES`, or less where the limit is so low that a tenant could not have four such responses."""
        return min(STREAM_BYTES, int(self.limits.memory_bytes * TENANT_SHARE / 4))

    async def reserve_stream(self, tenant: str, file_bytes: int = 0) -> ResponseReservation:
        """Reserve what a response needs that runs no call and is sent in pieces.

        It never needs more than a tenant can have, because the output that it reads exists already.

        Args:
            tenant: the tenant that sends the request.
            file_bytes: the size of the output that it reads from a file.

        Raises:
            QuotaExceeded: there was no room within `limits.answer_wait_s`.
        """
        reservation = ResponseReservation(self, tenant, self._stream_bytes(), min(file_bytes, int(self.limits.file_bytes * TENANT_SHARE)))
        return await self._obtain(reservation)

    def nothing_reserved(self, tenant: str) -> ResponseReservation:
        """A reservation of nothing, for calls without an HTTP request: their outputs stay in memory where there is room."""
        return ResponseReservation(self, tenant, 0, 0)

    async def _obtain(self, reservation: ResponseReservation) -> ResponseReservation:
        """Admit a reservation, at once where there is room and no other request of the tenant waits."""
        if self._queue.try_admit(reservation):
            return reservation
        self._check_possible(reservation)
        try:
            await self._queue.wait_for_room(reservation, self.limits.wait_s)
        except QueueFull as full:
            raise self._no_room(reservation, f"{full.waiting_count} requests of this tenant wait for room") from None
        except TimeoutError:
            raise self._no_room(reservation, f"there was no room within the {self.limits.wait_s:g} s of `limits.answer_wait_s`") from None
        return reservation

    def _fits(self, wanted: ResponseReservation) -> bool:
        memory, file = self._needs(wanted)
        return memory.fits and file.fits

    def has_room_for_output(self, tenant: str, size_bytes: int) -> bool:
        """Whether an output of a tenant may stay in memory."""
        used, most = self._usage_by_tenant.get(tenant) or _Usage(), self.limits.memory_bytes * OUTPUT_SHARE
        return self._total.memory_bytes + size_bytes <= most and used.memory_bytes + size_bytes <= most * TENANT_SHARE

    def add_usage(self, tenant: str, *, memory_bytes: int = 0, file_bytes: int = 0) -> None:
        """Count more as held."""
        for use in (self._total, self._usage_by_tenant.setdefault(tenant, _Usage())):
            use.memory_bytes += memory_bytes
            use.file_bytes += file_bytes

    def remove_usage(self, tenant: str, *, memory_bytes: int = 0, file_bytes: int = 0) -> None:
        """Count less as held, and admit the requests that wait for room."""
        used = self._usage_by_tenant[tenant]
        for use in (self._total, used):
            use.memory_bytes -= memory_bytes
            use.file_bytes -= file_bytes
        if not used.memory_bytes and not used.file_bytes:
            del self._usage_by_tenant[tenant]
        self._queue.admit_waiting()

    def _admit(self, reservation: ResponseReservation) -> None:
        self.add_usage(reservation.tenant, memory_bytes=reservation.memory_bytes, file_bytes=reservation.file_bytes)

    def _needs(self, wanted: ResponseReservation) -> tuple[_Need, _Need]:
        used = self._usage_by_tenant.get(wanted.tenant) or _Usage()
        return (
            _Need("answer_memory_bytes", wanted.memory_bytes, used.memory_bytes, self._total.memory_bytes, self.limits.memory_bytes),
            _Need("answer_file_bytes", wanted.file_bytes, used.file_bytes, self._total.file_bytes, self.limits.file_bytes),
        )

    def _check_possible(self, wanted: ResponseReservation) -> None:
        for need in self._needs(wanted):
            if need.wanted_bytes > need.limit_bytes * TENANT_SHARE:
                raise InvalidRequest(f"calls: {need}: send fewer calls, or a lower output_limit_bytes", field="calls", limit=need.name)

    def _no_room(self, wanted: ResponseReservation, why: str) -> QuotaExceeded:
        need = next((need for need in self._needs(wanted) if not need.fits), self._needs(wanted)[0])
        return QuotaExceeded(
            f"{need}, and {why}: nothing has run; read the responses that wait, and send the request again later", limit=need.name, retry_after_s=2
        )


class _Need(NamedTuple):
    """What a request needs of one limit, and how much of the limit is held already."""

    name: str
    wanted_bytes: int
    tenant_bytes: int
    total_bytes: int
    limit_bytes: int

    @property
    def fits(self) -> bool:
        return self.total_bytes + self.wanted_bytes <= self.limit_bytes and self.tenant_bytes + self.wanted_bytes <= self.limit_bytes * TENANT_SHARE

    def __str__(self) -> str:
        return f"the response may take {self.wanted_bytes} bytes of the {self.limit_bytes} of `limits.{self.name}`, of which one tenant may have half"
