"""When it is proven that others kept a call from its slot's share of the processor."""

from __future__ import annotations

import pytest

from sandbox_server.agent.kernel.processor_share import ProcessorAccount, Processors, ProcessorTimes, promised_share

START = ProcessorTimes(100.0, 5.0, 7.0, 9.0, False)


def after(seconds: float, ran: float, waited: float, slot_ran: float | None = None, lowered: bool = False) -> ProcessorTimes:
    """What has been used so long after the start; the call is all that runs in its slot unless said otherwise."""
    return ProcessorTimes(
        START.at_s + seconds, START.call_ran_s + ran, START.call_waited_s + waited, START.slot_ran_s + (ran if slot_ran is None else slot_ran), lowered
    )


def account(share: float, *looks: ProcessorTimes) -> ProcessorAccount:
    made = ProcessorAccount(share, START)
    for look in looks:
        made.add_measurement(look)
    return made


def test_the_proof_says_what_was_owed_and_what_was_given() -> None:
    assert account(0.25, after(2.0, 0.1, 1.9)).starvation_evidence() == {"share_processors": 0.25, "owed_s": 0.5, "given_s": 0.1, "lost_s": 1.6}


@pytest.mark.parametrize(
    ("why", "share", "look"),
    [
        ("it had its share, however much it wanted", 0.25, after(2.0, 0.5, 1.5)),
        ("it had nearly its share", 0.25, after(2.0, 0.42, 1.5)),
        ("it ran all the time, and no more was to be had by one thread", 2.0, after(2.0, 2.0, 0.0)),
        ("it slept and wanted nothing", 0.25, after(2.0, 0.01, 0.0)),
        ("it wanted little and got most of it", 0.25, after(10.0, 0.2, 0.04)),
        ("its own slot took the rest", 0.25, after(2.0, 0.01, 1.99, slot_ran=0.6)),
        ("it asked for less", 0.25, after(2.0, 0.0, 2.0, lowered=True)),
        ("it slept nearly all of the time", 0.5, after(30.0, 0.1, 0.9)),
        ("it is a matter of ticks", 0.25, after(0.1, 0.0, 0.1)),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_it_is_not_proven(why: str, share: float, look: ProcessorTimes) -> None:
    assert account(share, look).starvation_evidence() is None, why


def test_what_was_given_while_it_slept_is_not_owed() -> None:
    # Two seconds asleep, then one in which it could hardly run: only that second counts.
    assert account(0.5, after(2.0, 0.0, 0.0), after(3.0, 0.1, 0.9)).starvation_evidence() == {
        "share_processors": 0.5,
        "owed_s": 0.5,
        "given_s": 0.1,
        "lost_s": 0.8,
    }


def test_plenty_before_makes_up_for_little_later() -> None:
    assert account(0.25, after(5.0, 5.0, 0.0), after(10.0, 5.1, 4.9)).starvation_evidence() is None


def test_once_it_asked_for_less_it_stays_unproven() -> None:
    assert account(0.25, after(1.0, 0.0, 1.0, lowered=True), after(5.0, 0.1, 4.9)).starvation_evidence() is None


@pytest.mark.parametrize(
    ("processors", "cpu", "threads", "limit"),
    [
        (Processors((0, 1, 2, 3)), None, 4, None),
        (Processors((0, 1, 2, 3)), 0.5, 1, 1),
        (Processors((0, 1, 2, 3)), 2.5, 3, 3),
        (Processors((0, 1, 2, 3)), 4.0, 4, None),
        (Processors(tuple(range(64)), quota=1.5), None, 2, None),
        (Processors(tuple(range(64)), quota=1.5), 1.0, 1, 1),
        (Processors(tuple(range(64)), quota=1.5), 8.0, 2, None),
        (Processors((3,), quota=8.0), None, 1, None),
    ],
)
def test_a_slot_is_told_what_its_limit_and_the_quota_of_its_container_leave(processors: Processors, cpu: float | None, threads: int, limit: int | None) -> None:
    assert (processors.count_of_slot(cpu), processors.limit_of_slot(cpu)) == (threads, limit)


def test_slots_are_pinned_to_all_processors_in_turn() -> None:
    processors = Processors((0, 2, 4, 6), first=3)

    assert [processors.pinned_to(1.5, slot) for slot in range(3)] == [[6, 0], [2, 4], [6, 0]]
    assert processors.pinned_to(None, 0) == processors.pinned_to(3.5, 0) == []


@pytest.mark.parametrize(("processors", "slots", "cpu", "share"), [(2, 8, None, 0.25), (64, 4, 2.0, 2.0), (2, 8, 1.0, 0.25), (1, 1, None, 1.0)])
def test_a_slot_is_promised_an_equal_part_and_no_more_than_its_limit(processors: int, slots: int, cpu: float | None, share: float) -> None:
    assert promised_share(processors, slots, cpu) == share
