"""The budget of responses: reservations, waiting for room, refusals, and which outputs stay in memory."""

from __future__ import annotations

import asyncio

import pytest

from sandbox_server.core.errors import InvalidRequest, QuotaExceeded
from sandbox_server.core.execution import Fault, OutputFile, Reason, Result, ToolCall
from sandbox_server.dispatch.limits.response_budget import CALL_BYTES, STREAM_BYTES, ResponseBudget, ResponseLimits, ResponseReservation

MIB = 1 << 20


def calls(count: int, limit: int = 50_000) -> list[ToolCall]:
    return [ToolCall(call_id=f"c{n}", lease_id="l", tool="bash", args={}, output_limit_bytes=limit) for n in range(count)]


def budget(memory_calls: int = 1000, file_bytes: int = 100 * MIB, wait_s: float = 30.0) -> ResponseBudget:
    return ResponseBudget(ResponseLimits(memory_bytes=2 * memory_calls * CALL_BYTES, file_bytes=file_bytes, wait_s=wait_s))


async def test_usual_batches_never_wait_for_each_other() -> None:
    usual = ResponseBudget(ResponseLimits(wait_s=0.0))

    assert len([await usual.reserve("alice", calls(1000)) for _ in range(20)]) == 20


async def test_large_limits_wait_for_their_turn_in_order_and_another_tenant_does_not() -> None:
    of = budget()
    first = await of.reserve("alice", calls(5, 10 * MIB))
    second = asyncio.create_task(of.reserve("alice", calls(1, 10 * MIB)))
    third = asyncio.create_task(of.reserve("alice", calls(1)))
    await of.reserve("bob", calls(5, 10 * MIB))

    await asyncio.sleep(0)
    assert not second.done()
    assert not third.done()
    first.release()
    assert (await second).file_bytes == 10 * MIB
    await third


async def test_after_the_wait_it_is_429_by_the_name_of_the_limit() -> None:
    of = budget(wait_s=0.01)
    await of.reserve("alice", calls(5, 10 * MIB))

    with pytest.raises(QuotaExceeded, match=r"answer_file_bytes.*answer_wait_s") as refused:
        await of.reserve("alice", calls(1, 10 * MIB))
    assert refused.value.extra["limit"] == "answer_file_bytes"
    assert refused.value.extra["retry_after_s"] > 0


async def test_more_than_a_share_is_refused_at_once() -> None:
    with pytest.raises(InvalidRequest, match=r"limits.answer_memory_bytes"):
        await budget(memory_calls=10).reserve("alice", calls(11))


async def test_who_waits_and_goes_leaves_no_trace() -> None:
    of = budget()
    first = await of.reserve("alice", calls(1000))
    waiting = [asyncio.create_task(of.reserve("alice", calls(1000))) for _ in range(2)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.wait({waiting[0]})
    first.release()
    (await waiting[1]).release()

    assert of == budget()


async def test_who_is_let_in_and_cancelled_in_one_turn_gives_it_back() -> None:
    of = budget()
    first = await of.reserve("alice", calls(1000))
    waiting = asyncio.create_task(of.reserve("alice", calls(1000)))
    await asyncio.sleep(0)
    first.release()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting

    assert of == budget()


async def test_outputs_take_at_most_half_so_that_others_still_come_in() -> None:
    of = budget()
    unread: ResponseReservation = await of.reserve("alice", calls(1))
    kept = 0
    while unread.try_reserve_output(50_000):
        kept += 1

    assert CALL_BYTES + kept * 50_000 <= of.limits.memory_bytes / 4 < CALL_BYTES + (kept + 1) * 50_000
    await of.reserve("alice", calls(400))
    unread.release()
    assert unread.try_reserve_output(1 << 40)  # nothing is kept for a request that is over


async def test_what_was_not_written_is_given_back() -> None:
    of = budget()
    (call,) = calls(1, 10 * MIB)
    held = await of.reserve("alice", [call])
    file = OutputFile(path="/x", size_bytes=MIB)
    result = Result(call_id="c0", lease_id="l", reason=Reason.EXIT, fault=Fault.NONE, output_file=file)
    held.release_unwritten_output(call, result)

    assert held.file_bytes == MIB
    held.release_sent_result(result)
    assert (held.memory_bytes, held.file_bytes) == (STREAM_BYTES, 0)  # its answer is still sent in pieces


async def test_an_answer_that_runs_no_call_takes_room_too_and_never_more_than_there_can_be() -> None:
    of = ResponseBudget(ResponseLimits(memory_bytes=8 * STREAM_BYTES, file_bytes=2 * MIB, wait_s=0.0))
    held = await of.reserve_stream("a", 100 * MIB)

    assert (held.memory_bytes, held.file_bytes) == (STREAM_BYTES, MIB)
    with pytest.raises(QuotaExceeded, match="answer_file_bytes"):
        await of.reserve_stream("a", 1)
    for _ in range(3):
        await of.reserve_stream("a")
    with pytest.raises(QuotaExceeded, match="answer_memory_bytes"):
        await of.reserve_stream("a")
    await of.reserve_stream("b")
