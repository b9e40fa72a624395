"""Collects complete groups: an item whose group comes to nothing is put back, and replaced by the next one."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from environments.dataset_rows import UnusableRow
from environments.rollouts.exec_tool import RunEndingFault
from environments.rollouts.group import GroupLost, GroupRunner, ToolSelector
from environments.rollouts.item_queue import PutBackItems, item_name
from environments.rollouts.statistics import RolloutStatistics
from environments.rollouts.trajectory import MODEL_SERVER, TrajectoryRecord

log = logging.getLogger(__name__)


class RunFailed(Exception):
    """The run cannot go on. The message is one sentence for the person who has started it."""


class GroupCollector:
    """Collects complete groups.

    Args:
        groups: rolls out one group.
        put_back: where items are put back.
        statistics: what becomes known about the rollouts.
        next_item: returns the item that replaces one whose group came to nothing; None if there is none.
        wait_for_model_server: waits until the model server answers, after it did not.
        max_lost_groups: after so many groups in a row that came to nothing, the run fails.
    """

    def __init__(
        self,
        groups: GroupRunner,
        put_back: PutBackItems,
        statistics: RolloutStatistics,
        *,
        next_item: Callable[[], Awaitable[Any]],
        wait_for_model_server: Callable[[], Awaitable[None]],
        max_lost_groups: int,
    ) -> None:
        self._groups = groups
        self._put_back = put_back
        self._statistics = statistics
        self._next_item = next_item
        self._wait_for_model_server = wait_for_model_server
        self._max_lost_groups = max_lost_groups
        self._lost_in_a_row = 0
        self._excluded_in_a_row = 0

    async def collect(self, item: Any, size: int, select_tools: ToolSelector) -> tuple[TrajectoryRecord, ...] | None:
        """Roll out the group of an item, or of the items after it, until one group is complete.

        Args:
            item: the first item.
            size: how many trajectories the group has.
            select_tools: returns the names of the tools of the next group.

        Returns:
            The scored trajectories, or None if there are no more items.

        Raises:
            RunFailed: too many groups in a row came to nothing, or no group can succeed any more.
            PoolUnavailable: no group can have slots.
        """
        given = item
        while item is not None:
            try:
                records = await self._groups.run(item, size, select_tools)
            except UnusableRow as error:
                self._record_unusable(item, error)
            except GroupLost as error:
                self._record_lost(item, error)
                if error.fault.reason == MODEL_SERVER:
                    await self._wait_for_model_server()
            except RunEndingFault as error:
                self._statistics.count(lost_group_count=1)
                raise RunFailed(error.message) from error
            except BaseException:  # above all a cancellation
                if item is not given:  # the caller knows of the given item alone, and may use it again
                    self._put_back.return_unused(item)
                raise
            else:
                self._lost_in_a_row = self._excluded_in_a_row = 0
                self._put_back.forget(item)
                return records
            item = await self._next_item()
        return None

    def _record_unusable(self, item: Any, error: UnusableRow) -> None:
        """Exclude an item.

        Raises:
            RunFailed: the environment gives items again and again that are excluded.
        """
        name = item_name(item)
        if self._put_back.is_excluded(item):
            self._excluded_in_a_row += 1
            if self._excluded_in_a_row >= self._max_lost_groups:
                raise RunFailed(f"no row could be used: the environment gives only rows that are unusable, such as {name}: {error}")
            return
        self._put_back.exclude(item)
        self._statistics.record_unusable_row(name, str(error))
        log.warning("row %s cannot be used: %s", name, error)

    def _record_lost(self, item: Any, error: GroupLost) -> None:
        """Put the item of a lost group back.

        Raises:
            RunFailed: too many groups in a row came to nothing.
        """
        self._lost_in_a_row += 1
        again = self._put_back.put_back(item)
        self._statistics.count(lost_group_count=1, put_back_count=again)
        log.warning("the group of item %s came to nothing, and the item is %s: %s", item_name(item), "put back" if again else "left out", error)
        if self._lost_in_a_row >= self._max_lost_groups:
            raise RunFailed(f"{self._lost_in_a_row} groups in a row came to nothing (max_lost_groups); the last one because of: {error}")
