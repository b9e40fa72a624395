"""The results of one request, as they arrive."""

from __future__ import annotations

import asyncio

from sandbox_server.core.execution import Fault, Reason, Result
from sandbox_server.dispatch.batch import Batch
from sandbox_server.dispatch.limits.response_budget import ResponseBudget


def result(call_id: str) -> Result:
    return Result(call_id=call_id, lease_id="a", reason=Reason.EXIT, fault=Fault.NONE, exit_code=0)


async def test_all_is_in_the_order_of_the_calls() -> None:
    batch = Batch(3, ResponseBudget().nothing_reserved("alice"))
    for index in (2, 0, 1):
        batch.deliver_result(index, result(str(index)))

    assert [one.call_id for one in await batch.all_results()] == ["0", "1", "2"]


async def test_next_is_in_the_order_of_finishing_and_then_none() -> None:
    batch = Batch(3, ResponseBudget().nothing_reserved("alice"))
    batch.deliver_result(2, result("2"))
    batch.deliver_result(0, result("0"))

    assert [index for index, _ in await batch.next_results(1.0) or []] == [2, 0]
    assert await batch.next_results(0.0) == []
    waiting = asyncio.create_task(batch.next_results(5.0))
    await asyncio.sleep(0)
    batch.deliver_result(1, result("1"))
    assert [index for index, _ in await waiting or []] == [1]
    assert await batch.next_results(5.0) is None


async def test_the_first_result_of_a_call_stays() -> None:
    batch = Batch(1, ResponseBudget().nothing_reserved("alice"))
    batch.deliver_result(0, result("first"))
    batch.deliver_result(0, result("second"))

    assert [one.call_id for one in await batch.all_results()] == ["first"]
