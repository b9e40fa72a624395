"""Tests of how the scripted model recognises conversations, and of the bounded record of requests."""

from __future__ import annotations

import asyncio

import pytest

from environments.demo.conversations import ConversationSoFar, ConversationTracker, Taken, UnknownConversation
from environments.demo.request_log import RequestLog, RequestRecord
from environments.demo.script import parse_script


def tracker_of(*names: str, max_marks: int = 100) -> ConversationTracker:
    trajectories = [{"name": name, "turns": [{"text": "x"}]} for name in names]
    return ConversationTracker(parse_script({"prompts": [{"match": "go", "trajectories": trajectories}]}).prompts, max_marks)


def take(tracker: ConversationTracker, data: bytes, count: int = 1) -> list[Taken]:
    boundaries = [index + 1 for index, byte in enumerate(data) if byte == ord("|")]
    return tracker.take(ConversationSoFar(data, boundaries), count, lambda: "go")


def described(taken: list[Taken]) -> list[tuple[str, int]]:
    return [(one.position.conversation.trajectory.name, one.position.turn) for one in taken]


def test_equal_conversations_are_interchangeable_until_their_answers_differ() -> None:
    tracker = tracker_of("a", "b", "c")
    first, second, third = (take(tracker, b"go")[0] for _ in range(3))
    tracker.answered(first, ConversationSoFar(b"go,same|"))
    tracker.answered(second, ConversationSoFar(b"go,same|"))
    tracker.answered(third, ConversationSoFar(b"go,other|"))
    assert described(take(tracker, b"go,other|reply")) == [("c", 1)]
    assert described(take(tracker, b"go,same|reply")) == [("a", 1)]
    assert described(take(tracker, b"go,same|another reply")) == [("b", 1)]
    assert tracker.conversation_count == 3


def test_a_request_that_is_repeated_continues_the_same_conversation() -> None:
    tracker = tracker_of("a", "b")
    (first,) = take(tracker, b"go")
    tracker.answered(first, ConversationSoFar(b"go,one|"))
    (second,) = take(tracker, b"go,one|reply")
    tracker.answered(second, ConversationSoFar(b"go,one|reply,two|"))
    (again,) = take(tracker, b"go,one|reply")
    assert (described([again]), again.repeated) == ([("a", 1)], True)
    tracker.put_back(again)
    assert described(take(tracker, b"go,one|reply,two|more")) == [("a", 2)]


def test_a_conversation_without_an_answer_waits_for_the_next_equal_request() -> None:
    tracker = tracker_of("a", "b", "c")
    first, second = take(tracker, b"go", count=2)
    for one in (second, first):
        tracker.put_back(one)
    assert described(take(tracker, b"go", count=3)) == [("a", 0), ("b", 0), ("c", 0)]


def test_a_key_names_the_conversation_whatever_came_before() -> None:
    tracker = tracker_of("a")
    tracker.answered(take(tracker, b"go")[0], ConversationSoFar(b"go,one|", key=b"call-1"))
    assert described(tracker.take(ConversationSoFar(b"short|", [6], b"call-1"), 1, lambda: "go")) == [("a", 1)]
    with pytest.raises(UnknownConversation, match="did not give"):
        tracker.take(ConversationSoFar(b"go,one|reply", [7], b"call-2"), 1, lambda: "go")


def test_what_no_prompt_matches_is_refused_and_old_marks_are_forgotten() -> None:
    tracker = tracker_of("a", max_marks=2)
    with pytest.raises(UnknownConversation, match="No prompt of the script matches"):
        tracker.take(ConversationSoFar(b"stay"), 1, lambda: "stay")
    for number in range(3):
        (one,) = take(tracker, b"go %d" % number)
        tracker.answered(one, ConversationSoFar(b"go %d,answer|" % number))
    assert described(take(tracker, b"go 2,answer|reply")) == [("a", 1)]
    assert described(take(tracker, b"go 0,answer|reply")) == [("a", 0)], "its mark is forgotten, and so is its beginning"


async def test_the_record_of_requests_is_bounded_by_count_and_by_bytes() -> None:
    log = RequestLog(max_records=3, max_body_bytes=10)
    waiting = asyncio.create_task(log.wait_for(lambda record: record.number == 5))
    await asyncio.sleep(0)  # the task begins to wait
    for number in range(1, 6):
        log.add(RequestRecord(log.next_number(), "/generate", b"[]", 200))
        await asyncio.sleep(0)  # whom the record wakes runs
        assert waiting.done() is (number == 5)
    assert [record.number for record in log.records] == [3, 4, 5]
    assert (await waiting).body == []
    log.add(RequestRecord(log.next_number(), "/generate", b"[1, 2, 3]", 200))
    assert [record.number for record in log.records] == [6]
    assert (await log.wait_for(lambda record: record.status == 200)).number == 6
