"""How much the answers under way may hold: in memory, and in files. What a request may need is reserved before the first of its calls runs.

In memory a call reserves `CALL_BYTES`, for all of its result but the output: few calls write as much as they may, so no room is taken for that.
An output up to `LARGE_OUTPUT_BYTES` is kept in memory where there is room for it once it is there, and in a file where there is none. Outputs take
at most half of the memory, so that answers which nobody reads cannot shut out the requests that come next.
In files a call reserves its `output_limit_bytes` where that is more than `LARGE_OUTPUT_BYTES`; what it has not written is given back with its result.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sandbox_server.core.errors import InvalidRequest, QuotaExceeded
from sandbox_server.core.execution import LARGE_OUTPUT_BYTES, Result, ToolCall

CALL_BYTES = 4096
"""What the result of one call takes beside its output, in bytes."""
STREAM_BYTES = 128 << 10
"""What an answer takes that is sent in pieces, in bytes: the pieces on their way, and what the server and the connection hold of them."""
TENANT_SHARE = 0.5
"""The share of each limit that one tenant may have."""
OUTPUT_SHARE = 0.5
"""The share of the memory that outputs may take."""
MAX_WAITING = 64
"""How many requests of a tenant wait for room at once; each holds its body."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerLimits:
    """How much there is, by the names of the settings.

    Args:
        memory_bytes: `limits.answer_memory_bytes`.
        file_bytes: `limits.answer_file_bytes`.
        wait_s: how long a request waits for room, in seconds (`limits.answer_wait_s`).
    """

    memory_bytes: int = 256 << 20
    file_bytes: int = 2 << 30
    wait_s: float = 10


@dataclass(slots=True)
class _Use:
    memory_bytes: int = 0
    file_bytes: int = 0


@dataclass(slots=True, eq=False)
class _Waiter:
    reservation: Reservation
    admitted: asyncio.Future[None]


@dataclass(slots=True, eq=False)
class Reservation:
    """What one request holds of the budget. To be released when its answer is out, however that went.

    Args:
        budget: whose part it is.
        tenant: whose request.
        memory_bytes: what it holds in memory.
        file_bytes: what it holds in files.
    """

    budget: AnswerBudget
    tenant: str
    memory_bytes: int
    file_bytes: int
    is_released: bool = False

    def try_reserve_output(self, size_bytes: int) -> bool:
        """Take memory for an output, if there is room for one so large; whether there was. A request that is over keeps nothing, so nothing is counted."""
        if self.is_released or not size_bytes:
            return True
        if size_bytes > LARGE_OUTPUT_BYTES or not self.budget.has_room_for_output(self.tenant, size_bytes):
            return False
        self.memory_bytes += size_bytes
        self.budget.take(self.tenant, memory_bytes=size_bytes)
        return True

    def release_unwritten_output(self, call: ToolCall, result: Result) -> None:
        """Give back what a call reserved in files and has not written."""
        written = result.output_file.size_bytes if result.output_file is not None else 0
        self._give_back(file_bytes=max(0, _file_bytes(call) - written))

    def release_sent_result(self, result: Result) -> None:
        """Give back what a result took that has been sent, and is held no more."""
        written = result.output_file.size_bytes if result.output_file is not None else 0
        self._give_back(memory_bytes=CALL_BYTES + result.held_bytes, file_bytes=written)

    def release(self) -> None:
        """Give everything back. Again: nothing."""
        self._give_back(memory_bytes=self.memory_bytes, file_bytes=self.file_bytes)
        self.is_released = True

    def _give_back(self, memory_bytes: int = 0, file_bytes: int = 0) -> None:
        if self.is_released:
            return
        memory_bytes, file_bytes = min(memory_bytes, self.memory_bytes), min(file_bytes, self.file_bytes)
        if memory_bytes or file_bytes:
            self.memory_bytes -= memory_bytes
            self.file_bytes -= file_bytes
            self.budget.give_back(self.tenant, memory_bytes=memory_bytes, file_bytes=file_bytes)


def _file_bytes(call: ToolCall) -> int:
    return call.output_limit_bytes if call.output_limit_bytes > LARGE_OUTPUT_BYTES else 0


@dataclass(slots=True)
class AnswerBudget:
    """The budget of all answers, and each tenant's share of it: half.

    Args:
        limits: how much there is.
    """

    limits: AnswerLimits = field(default_factory=AnswerLimits)
    _all: _Use = field(default_factory=_Use)
    _of: dict[str, _Use] = field(default_factory=dict)
    _waiting: dict[str, deque[_Waiter]] = field(default_factory=dict)

    async def reserve(self, tenant: str, items: Sequence[ToolCall | Result]) -> Reservation:
        """Take what the answer to these calls may need; wait for room where there is none, behind the tenant's other requests.

        Raises:
            InvalidRequest: it is more than a tenant can ever have.
            QuotaExceeded: there has been no room for as long as a request waits.
        """
        calls = [item for item in items if isinstance(item, ToolCall)]
        file_bytes = sum(_file_bytes(call) for call in calls)
        reservation = Reservation(self, tenant, CALL_BYTES * len(items) + (self._stream_bytes() if file_bytes else 0), file_bytes)
        if tenant not in self._waiting and self._fits(reservation):
            self._admit(reservation)
        else:
            self._check_possible(reservation)
            await self._wait(reservation)
        return reservation

    def _stream_bytes(self) -> int:
        """`STREAM_BYTES`; where the limit is set very low, so much that a tenant may still have four such answers."""
        return min(STREAM_BYTES, int(self.limits.memory_bytes * TENANT_SHARE / 4))

    async def reserve_stream(self, tenant: str, file_bytes: int = 0) -> Reservation:
        """Take what an answer needs that runs no call and is sent in pieces: what it reads is there already, so it takes no more than a tenant can have.

        Args:
            tenant: who asks.
            file_bytes: how large the output is that it reads from a file.

        Raises:
            QuotaExceeded: there has been no room for as long as a request waits.
        """
        reservation = Reservation(self, tenant, self._stream_bytes(), min(file_bytes, int(self.limits.file_bytes * TENANT_SHARE)))
        if tenant not in self._waiting and self._fits(reservation):
            self._admit(reservation)
        else:
            await self._wait(reservation)
        return reservation

    def nothing_reserved(self, tenant: str) -> Reservation:
        """For calls that nobody asked for over HTTP: their outputs are kept where there is room."""
        return Reservation(self, tenant, 0, 0)

    async def _wait(self, reservation: Reservation) -> None:
        line = self._waiting.setdefault(reservation.tenant, deque())
        if len(line) >= MAX_WAITING:
            raise self._no_room(reservation, f"{len(line)} requests of this tenant wait for room already")
        waiter = _Waiter(reservation, asyncio.get_running_loop().create_future())
        line.append(waiter)
        try:
            async with asyncio.timeout(self.limits.wait_s):
                await waiter.admitted
        except BaseException as error:
            if waiter.admitted.done() and not waiter.admitted.cancelled():
                reservation.release()
            elif waiter in line:
                line.remove(waiter)
            self._go_on()
            if isinstance(error, TimeoutError):
                raise self._no_room(reservation, f"there was no room within the {self.limits.wait_s:g} s of `limits.answer_wait_s`") from None
            raise

    def _fits(self, wanted: Reservation) -> bool:
        return all(need.fits for need in self._needs(wanted))

    def has_room_for_output(self, tenant: str, size_bytes: int) -> bool:
        """Whether an output of that size may be kept in memory."""
        used, most = self._of.get(tenant) or _Use(), self.limits.memory_bytes * OUTPUT_SHARE
        return self._all.memory_bytes + size_bytes <= most and used.memory_bytes + size_bytes <= most * TENANT_SHARE

    def take(self, tenant: str, *, memory_bytes: int = 0, file_bytes: int = 0) -> None:
        """So much more is held."""
        for use in (self._all, self._of.setdefault(tenant, _Use())):
            use.memory_bytes += memory_bytes
            use.file_bytes += file_bytes

    def give_back(self, tenant: str, *, memory_bytes: int = 0, file_bytes: int = 0) -> None:
        """So much is held no more; whoever waits for it goes on."""
        used = self._of[tenant]
        for use in (self._all, used):
            use.memory_bytes -= memory_bytes
            use.file_bytes -= file_bytes
        if not used.memory_bytes and not used.file_bytes:
            del self._of[tenant]
        if self._waiting:
            self._go_on()

    def _admit(self, reservation: Reservation) -> None:
        self.take(reservation.tenant, memory_bytes=reservation.memory_bytes, file_bytes=reservation.file_bytes)

    def _go_on(self) -> None:
        """Let in whoever fits: within a tenant the first first, and each tenant's first before anybody's second."""
        lines = dict(self._waiting)
        while lines:
            for tenant, line in list(lines.items()):
                if line and self._fits(line[0].reservation):
                    waiter = line.popleft()
                    if not waiter.admitted.done():
                        self._admit(waiter.reservation)
                        waiter.admitted.set_result(None)
                else:
                    del lines[tenant]
        self._waiting = {tenant: line for tenant, line in self._waiting.items() if line}

    def _needs(self, wanted: Reservation) -> tuple[_Need, _Need]:
        used = self._of.get(wanted.tenant) or _Use()
        return (
            _Need("answer_memory_bytes", wanted.memory_bytes, used.memory_bytes, self._all.memory_bytes, self.limits.memory_bytes),
            _Need("answer_file_bytes", wanted.file_bytes, used.file_bytes, self._all.file_bytes, self.limits.file_bytes),
        )

    def _check_possible(self, wanted: Reservation) -> None:
        for need in self._needs(wanted):
            if need.wanted_bytes > need.limit_bytes * TENANT_SHARE:
                raise InvalidRequest(f"calls: {need}: send fewer calls, or a lower output_limit_bytes", field="calls", limit=need.name)

    def _no_room(self, wanted: Reservation, why: str) -> QuotaExceeded:
        need = next((need for need in self._needs(wanted) if not need.fits), self._needs(wanted)[0])
        return QuotaExceeded(f"{need}, and {why}: nothing has run; read the answers that wait, and ask again later", limit=need.name, retry_after_s=2)


class _Need(NamedTuple):
    """What a request wants of one limit, and what is held of it already, in bytes."""

    name: str
    wanted_bytes: int
    of_tenant_bytes: int
    of_all_bytes: int
    limit_bytes: int

    @property
    def fits(self) -> bool:
        return self.of_all_bytes + self.wanted_bytes <= self.limit_bytes and self.of_tenant_bytes + self.wanted_bytes <= self.limit_bytes * TENANT_SHARE

    def __str__(self) -> str:
        return f"the answer may take {self.wanted_bytes} bytes of the {self.limit_bytes} of `limits.{self.name}`, of which one tenant may have half"
