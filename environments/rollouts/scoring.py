"""Runs reward functions: plain functions in threads, and coroutine functions in the event loop."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from typing import Any

from env_client import SandboxError
from environments.agent_loop import AgentResult
from environments.rollouts.cancellation import finish_despite_cancellation
from environments.rollouts.exec_tool import RolloutFault
from environments.tool_context import ToolContext, ToolFault

#: A reward function: item, result and tool context → reward.
RewardFunction = Callable[[Any, AgentResult, ToolContext], float | Awaitable[float]]


async def compute_reward_in_slot(function: RewardFunction, item: Any, result: AgentResult, context: ToolContext, executor: Executor) -> float:
    """Run a reward function and return the reward.

    Args:
        function: the reward function.
        item: the item of the rollout.
        result: what the agent loop returned.
        context: the slot. It is cleaned up at the end, also if the task is cancelled; a thread that still runs then gets an error at its next call.
        executor: the threads for plain functions.

    Raises:
        RolloutFault: a tool call failed through no fault of the model, even if the function caught the error.
    """
    try:
        if inspect.iscoroutinefunction(function):
            reward = await function(item, result, context)
        else:
            reward = await asyncio.get_running_loop().run_in_executor(executor, function, item, result, context)
    except SandboxError as error:
        if context.fault is None:  # a mistake in the function, such as an unknown tool
            raise
        raise _rollout_fault(context.fault) from error
    finally:
        await finish_despite_cancellation(asyncio.to_thread(context.cleanup))
    if context.fault is not None:
        raise _rollout_fault(context.fault)
    return check_reward(reward)


def check_reward(reward: Any) -> float:
    """Return a reward as a number.

    Raises:
        TypeError: the reward is not a finite number.
    """
    if isinstance(reward, bool | int | float) and math.isfinite(reward):
        return float(reward)
    try:
        number = float(reward.item())  # a scalar of numpy or torch
    except (AttributeError, TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise TypeError(f"the reward must be a finite number, and is {reward!r:.100}")
    return number


def _rollout_fault(error: SandboxError) -> RolloutFault:
    if isinstance(error, ToolFault):
        return RolloutFault(error.detail, reason=error.result.reason, fault="ambiguous" if error.result.fault == "ambiguous" else "infra")
    return RolloutFault.from_error(error)
