"""Evaluation: each item is rolled out once, several at the same time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from environments.dataset_rows import UnusableRow
from environments.rollouts.group import GroupLost, GroupRunner, ToolSelector
from environments.rollouts.item_queue import item_name
from environments.rollouts.statistics import RolloutStatistics
from environments.rollouts.trajectory import TrajectoryRecord

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What an evaluation came to.

    Args:
        metrics: the metrics by name.
        samples: for each item that was scored, its name, its reward and the conversation.
    """

    metrics: dict[str, float]
    samples: list[dict[str, Any]]


async def evaluate_items(
    groups: GroupRunner, items: Sequence[Any], select_tools: ToolSelector, statistics: RolloutStatistics, *, max_concurrent: int
) -> Evaluation:
    """Roll out each item once. Items that cannot be scored are left out of the mean, and counted.

    Args:
        groups: rolls out groups, here of one trajectory each.
        items: the items.
        select_tools: returns the names of the tools of the next group.
        statistics: what becomes known about the rollouts.
        max_concurrent: how many items are rolled out at the same time at most.

    Raises:
        PoolUnavailable: no rollout can have a slot.
    """
    turn = asyncio.Semaphore(max_concurrent)
    samples: list[dict[str, Any]] = []

    async def evaluate(item: Any) -> None:
        async with turn:
            try:
                (record,) = await groups.run(item, 1, select_tools)
            except UnusableRow as error:
                statistics.record_unusable_row(item_name(item), str(error))
                log.warning("row %s cannot be used: %s", item_name(item), error)
            except GroupLost as error:
                statistics.count(lost_group_count=1)
                log.warning("item %s is not evaluated: %s", item_name(item), error)
            else:
                samples.append(_sample(item, record))

    tasks = [asyncio.create_task(evaluate(item)) for item in items]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return Evaluation(_metrics(samples, len(items)), samples)


def _sample(item: Any, record: TrajectoryRecord) -> dict[str, Any]:
    result = record.result
    messages = result.messages if result is not None else []
    return {
        "item": item_name(item),
        "reward": record.reward,
        "turns": result.turns_used if result else 0,
        "meta": dict(record.score_meta),
        "messages": messages,
    }


def _metrics(samples: Sequence[dict[str, Any]], item_count: int) -> dict[str, float]:
    metrics: dict[str, float] = {"eval/items": item_count, "eval/scored": len(samples)}
    if samples:
        rewards = [float(sample["reward"]) for sample in samples]
        metrics["eval/reward_mean"] = sum(rewards) / len(rewards)
        metrics["eval/pass_rate"] = sum(reward >= 1 for reward in rewards) / len(rewards)
    return metrics
