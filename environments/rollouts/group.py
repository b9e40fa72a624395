"""A group of trajectories of one item, whose slots are acquired as one gang. Members that are lost to faults are rolled out again in new slots."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from env_client import AsyncLease
from environments.dataset_rows import UnusableRow
from environments.rollouts.cancellation import finish_despite_cancellation, was_cancelled
from environments.rollouts.exec_tool import RolloutFault, RunEndingFault
from environments.rollouts.service import PoolConnection, PoolUnavailable
from environments.rollouts.statistics import RolloutStatistics
from environments.rollouts.trajectory import TrajectoryRecord, TrajectoryRunner

log = logging.getLogger(__name__)


#: Returns the names of the tools that the model of one group may call.
ToolSelector = Callable[[], Awaitable[Sequence[str]]]


class GroupLost(Exception):
    """A group came to nothing: a member of it was lost as often as the settings allow.

    Args:
        fault: the fault of the last attempt.
    """

    def __init__(self, fault: RolloutFault) -> None:
        super().__init__(fault.message)
        self.fault = fault


@dataclass(frozen=True, slots=True)
class _Places:
    """Where the slot and the final record of a member are kept, by its number. A slot is removed when its release begins."""

    number: int
    held: dict[int, AsyncLease]
    complete: dict[int, TrajectoryRecord]


class GroupRunner:
    """Rolls out groups.

    Args:
        pool: the connection to the pool.
        trajectories: rolls out each trajectory.
        statistics: what becomes known about the rollouts.
        max_attempts: how often each member is begun at most.
    """

    def __init__(self, pool: PoolConnection, trajectories: TrajectoryRunner, statistics: RolloutStatistics, *, max_attempts: int) -> None:
        self._pool = pool
        self._trajectories = trajectories
        self._statistics = statistics
        self._max_attempts = max_attempts

    async def run(self, item: Any, size: int, select_tools: ToolSelector, *, group_id: str | None = None) -> tuple[TrajectoryRecord, ...]:
        """Roll out and score a group. However this ends, also by cancellation, no slot stays held.

        Args:
            item: the item.
            size: how many trajectories the group has.
            select_tools: returns the names of the tools that the model may call. It is called when the group has its slots, because a pool whose first
                sandbox has not started does not know its tools.
            group_id: names the group in the service; default a new name.

        Returns:
            The scored trajectories.

        Raises:
            GroupLost: a member could not be scored.
            UnusableRow: the item itself is bad.
            PoolUnavailable: no group can have slots.
            RunEndingFault: no group can succeed.
            As `select_tools`.
        """
        group_id = group_id or f"group-{secrets.token_hex(6)}"
        records = [TrajectoryRecord(f"{group_id}/{number}") for number in range(size)]
        held = dict(enumerate(await self._acquire_gang(records)))
        complete: dict[int, TrajectoryRecord] = {}
        try:
            tools = await select_tools()
            async with asyncio.TaskGroup() as tasks:
                for number, record in enumerate(records):
                    tasks.create_task(self._run_member(item, record, _Places(number, held, complete), tools))
        except BaseExceptionGroup as errors:
            raise _most_important(errors) from None
        finally:  # a member that was cancelled before its first step has not released its slot
            if held:
                await finish_despite_cancellation(self._pool.release(list(held.values()), cancelled=was_cancelled()))
            self._record_members(size, complete)
        return tuple(complete[number] for number in range(size))

    def _record_members(self, size: int, complete: Mapping[int, TrajectoryRecord]) -> None:
        """Record the members that could be scored: as scored if the group is complete, else as dropped."""
        for record in complete.values():
            if len(complete) == size:
                self._statistics.record_scored(record)
            else:
                self._statistics.record_dropped(record)
        self._statistics.count(group_count=len(complete) == size)

    async def _acquire_gang(self, records: Sequence[TrajectoryRecord]) -> tuple[AsyncLease, ...]:
        """Acquire a slot for each member, all or none.

        Raises:
            GroupLost: the slots could not be acquired.
            PoolUnavailable: no attempt can succeed.
        """
        for attempt in range(1, self._max_attempts + 1):
            with records[0].measure("acquire"):
                try:
                    return await self._pool.acquire([record.trajectory_id for record in records], waits_for_own=True)
                except RolloutFault as error:
                    fault = error
            self._statistics.record_fault(records[0], fault)
            records[0].phase_s["acquire"] = 0.0  # it is recorded
            log.warning("group %s has no slots (attempt %d of %d): %s", records[0].trajectory_id, attempt, self._max_attempts, fault.message)
        raise GroupLost(fault)

    async def _run_member(self, item: Any, record: TrajectoryRecord, places: _Places, tools: Sequence[str]) -> None:
        """Roll out one member until it is scored.

        Args:
            item: the item.
            record: the record of the first attempt.
            places: where its slot and its final record are kept.
            tools: the names of the tools.

        Raises:
            GroupLost: every attempt was lost.
            RunEndingFault: no other attempt can succeed.
        """
        first_id = record.trajectory_id
        for attempt in range(1, self._max_attempts + 1):
            if attempt > 1:
                self._statistics.count(repeated_count=1)
                record = TrajectoryRecord(f"{first_id}/attempt-{attempt}")
            try:
                await self._attempt(item, record, places, tools)
            except RolloutFault as error:
                fault = error
                self._statistics.record_fault(record, fault)
                if isinstance(fault, RunEndingFault):
                    raise
                log.warning("trajectory %s is not scored (attempt %d of %d): %s", record.trajectory_id, attempt, self._max_attempts, fault.message)
            except asyncio.CancelledError:
                self._statistics.record_cancelled(record)
                raise
            else:
                places.complete[places.number] = record
                self._statistics.count(rewarded_count=1)
                return
        raise GroupLost(fault)

    async def _attempt(self, item: Any, record: TrajectoryRecord, places: _Places, tools: Sequence[str]) -> None:
        if places.number not in places.held:
            with record.measure("acquire"):
                (places.held[places.number],) = await self._pool.acquire([record.trajectory_id], waits_for_own=True)
        try:
            await self._trajectories.run(item, places.held[places.number], tools, record)
        finally:
            with record.measure("release"):
                await finish_despite_cancellation(self._pool.release([places.held.pop(places.number)], cancelled=was_cancelled()))


def _most_important(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the error of the members that decides what becomes of the group and of the run."""
    flat = _flatten(errors)
    for kind in (PoolUnavailable, RunEndingFault, UnusableRow, GroupLost):
        for error in flat:
            if isinstance(error, kind):
                return error
    return flat[0]


def _flatten(errors: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    flat: list[BaseException] = []
    for error in errors.exceptions:
        flat += _flatten(error) if isinstance(error, BaseExceptionGroup) else [error]
    return flat
