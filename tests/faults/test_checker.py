"""The checker sees what it is there to see: each test plants one broken promise in a history that keeps all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.faults.checker import FULL_DISK_EXIT, check
from tests.faults.clients.claims import claims_seen
from tests.faults.history import Event, History, about

TTL_S = 20.0


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Tale:
    """A history in the making. Every step takes a second."""

    def __init__(self) -> None:
        self._clock = Clock()
        self.history = History(self._clock)

    def note(self, kind: str, **fields: Any) -> None:
        self._clock.now += 1.0
        self.history.note(kind, **fields)

    def wait(self, seconds: float) -> None:
        self._clock.now += seconds

    @property
    def now(self) -> float:
        return self._clock.now

    def grant(self, lease_id: str, *, slot: str = "0", epoch: int = 1, key: str | None = None, sandbox_id: str = "s-1") -> None:
        leases = [{"lease_id": lease_id, "sandbox_id": sandbox_id, "slot_id": slot, "epoch": epoch}]
        self.note("granted", client=0, key=key or f"key of {lease_id}", asked_at=self.now, began_at=self.now, ttl_s=TTL_S, leases=leases)

    def ran(self, lease_id: str, call_id: str, *, word: str = "ran") -> None:
        self.note("witness", word=word, call_id=call_id, lease_id=lease_id)

    def result(self, lease_id: str, call_id: str, reason: str = "exit", **fields: Any) -> None:
        log, holder = fields.pop("log", [call_id]), fields.pop("holder", "")
        result: dict[str, Any] = {"call_id": call_id, "reason": reason, "exit_code": 0 if reason == "exit" else None, "error": "", "metadata": {}}
        result["output"] = f"holder={holder}\nmark=\nfiles=holder log\nlog={' '.join(log)}\n" if reason == "exit" else ""
        asked_at = fields.pop("asked_at", self.now)
        self.note("result", client=0, lease_id=lease_id, call_id=call_id, asked_at=asked_at, began_at=asked_at, result={**result, **fields})

    def renew(self, lease_id: str) -> None:
        self.note("renewed", client=0, asked_at=self.now, ttl_s=TTL_S, leases=[lease_id], lost=[])

    def lose(self, lease_id: str, code: str) -> None:
        self.note("renewed", client=0, asked_at=self.now, ttl_s=TTL_S, leases=[], lost=[{"lease_id": lease_id, "code": code, "detail": "it is gone"}])

    def release(self, lease_id: str, *, unknown: bool = False) -> None:
        self.note("release", client=0, leases=[lease_id], run_id=None)
        answer = {"released": [], "unknown": [lease_id]} if unknown else {"released": [lease_id], "unknown": []}
        self.note("released", client=0, leases=[lease_id], **answer)

    def record_observation(self, what: str, lease_id: str | None = None, claimant: dict[str, Any] | None = None) -> None:
        self.note("seen", what=what, lease_id=lease_id, claimant=claimant)

    def fault(self, what: str, **fields: Any) -> None:
        self.note("fault", what=what, **fields)


def good_tale() -> Tale:
    """Two leases of one slot, one after the other, a call in each, a second sandbox that was killed."""
    tale = Tale()
    tale.grant("l-1")
    tale.ran("l-1", "c-1")
    tale.result("l-1", "c-1")
    tale.result("l-1", "c-1")
    tale.renew("l-1")
    tale.ran("l-1", "c-2")
    tale.result("l-1", "c-2", log=["c-1", "c-2"], holder="l-1")
    tale.release("l-1")
    tale.result("l-1", "c-3", "lease_lost")
    tale.grant("l-2", epoch=2)
    tale.grant("l-9", sandbox_id="s-9")
    tale.fault("agent.kill", sandbox_id="s-9")
    tale.result("l-9", "c-9", "sandbox_lost")
    return tale


def run_twice(tale: Tale) -> None:
    tale.ran("l-2", "c-5")
    tale.ran("l-2", "c-5")


def two_holders(tale: Tale) -> None:
    tale.grant("l-3", epoch=3)


def two_holders_though_renewed(tale: Tale) -> None:
    tale.wait(TTL_S - 8)
    tale.renew("l-2")
    tale.wait(TTL_S - 8)
    tale.grant("l-3", epoch=3)


def same_epoch(tale: Tale) -> None:
    tale.release("l-2")
    tale.grant("l-3", epoch=2)


def older_epoch(tale: Tale) -> None:
    tale.release("l-2")
    tale.wait(5)
    tale.grant("l-3", epoch=0)


def other_leases_for_a_key(tale: Tale) -> None:
    tale.grant("l-3", slot="1", key="key of l-2")


def lease_granted_twice(tale: Tale) -> None:
    tale.grant("l-2", epoch=2, key="another key")


def exit_never_witnessed(tale: Tale) -> None:
    tale.result("l-2", "c-5")


def denied_run(tale: Tale) -> None:
    tale.ran("l-2", "c-5")
    tale.wait(1)
    tale.result("l-2", "c-5", "backend_error", metadata={"may_have_run": False})


def changed_result(tale: Tale) -> None:
    tale.ran("l-2", "c-5")
    tale.result("l-2", "c-5")
    tale.result("l-2", "c-5", duration_s=2.0)


def changed_to_sandbox_lost(tale: Tale) -> None:
    tale.grant("l-8", sandbox_id="s-9", slot="1")
    tale.ran("l-8", "c-5")
    tale.result("l-8", "c-5")
    tale.result("l-8", "c-5", "sandbox_lost")


def sandbox_lost_for_nothing(tale: Tale) -> None:
    tale.result("l-2", "c-5", "sandbox_lost")


def lease_lost_for_nothing(tale: Tale) -> None:
    tale.result("l-2", "c-5", "lease_lost")


def renewal_lost(tale: Tale) -> None:
    tale.lose("l-2", "lease_lost")


def renewal_never_heard_of_it(tale: Tale) -> None:
    tale.lose("l-1", "lease_not_found")


def unknown_to_release(tale: Tale) -> None:
    tale.release("l-2", unknown=True)


def cancelled_for_nothing(tale: Tale) -> None:
    tale.ran("l-2", "c-5")
    tale.result("l-2", "c-5", "cancelled")


def failed_write_on_a_disk_with_room(tale: Tale) -> None:
    tale.ran("l-2", "c-5")
    tale.result("l-2", "c-5", exit_code=FULL_DISK_EXIT)


def foreign_mark(tale: Tale) -> None:
    tale.ran("l-2", "c-5")
    tale.result("l-2", "c-5", holder="l-1")


def foreign_file(tale: Tale) -> None:
    tale.ran("l-2", "c-5")
    tale.result("l-2", "c-5", output="holder=\nmark=\nfiles=log secret\nlog=c-5\n")


def foreign_log(tale: Tale) -> None:
    tale.ran("l-2", "c-5")
    tale.result("l-2", "c-5", log=["c-2", "c-5"])


def marks_gone(tale: Tale) -> None:
    for call_id in ("c-5", "c-6"):
        tale.ran("l-2", call_id)
        tale.result("l-2", call_id, log=[call_id])


def logged_twice(tale: Tale) -> None:
    tale.ran("l-2", "c-5")
    tale.result("l-2", "c-5", log=["c-5", "c-5"])


def ghost(tale: Tale) -> None:
    tale.wait(5)
    tale.ran("l-1", "c-2", word="ghost")


def wrong_answer(tale: Tale) -> None:
    tale.note("problem", client=0, verb="exec", leases=["l-2"], status=500, code="internal", detail="it broke")


def no_answer(tale: Tale) -> None:
    tale.note("unfinished", client=0, verb="exec", names=["c-5"], last="backend_error")


def died(tale: Tale) -> None:
    tale.note("died", status=1, began_at=tale.now, words="Traceback")


def key_lost(tale: Tale) -> None:
    tale.wait(30)
    tale.note("refused", client=0, key="k", asked_at=tale.now, began_at=tale.now, ttl_s=TTL_S, status=410, code="lease_lost", detail="all have ended")


def granted_past_the_claimant(tale: Tale) -> None:
    tale.record_observation("claimant", claimant={"tenant": "gangs", "count": 16})
    tale.record_observation("acquired", "l-9")


def left_over(tale: Tale) -> None:
    tale.note("leak", what="process 7")


PLANTED: list[tuple[Callable[[Tale], None], str]] = [
    (run_twice, "call ran twice"),
    (two_holders, "two holders"),
    (two_holders_though_renewed, "two holders"),
    (same_epoch, "epoch used twice"),
    (older_epoch, "epoch went back"),
    (other_leases_for_a_key, "request key answered otherwise"),
    (lease_granted_twice, "lease granted twice"),
    (exit_never_witnessed, "result without a run"),
    (denied_run, "denied a run"),
    (changed_result, "result changed"),
    (changed_to_sandbox_lost, "result changed"),
    (sandbox_lost_for_nothing, "lease lost"),
    (lease_lost_for_nothing, "lease lost"),
    (renewal_lost, "lease lost"),
    (renewal_never_heard_of_it, "lease lost"),
    (unknown_to_release, "lease forgotten"),
    (cancelled_for_nothing, "undeserved result"),
    (failed_write_on_a_disk_with_room, "undeserved result"),
    (foreign_mark, "foreign marks"),
    (foreign_file, "foreign marks"),
    (foreign_log, "foreign marks"),
    (marks_gone, "log of the workspace"),
    (logged_twice, "log of the workspace"),
    (ghost, "ghost"),
    (wrong_answer, "undeserved answer"),
    (no_answer, "no answer"),
    (died, "service died"),
    (key_lost, "lease lost"),
    (granted_past_the_claimant, "granted past the claimant"),
    (left_over, "leak"),
]


def test_a_good_history_has_no_violation() -> None:
    assert check(good_tale().history.events) == []


@pytest.mark.parametrize(("plant", "rule"), PLANTED, ids=[plant.__name__ for plant, _ in PLANTED])
def test_a_planted_violation_is_found(plant: Callable[[Tale], None], rule: str) -> None:
    tale = good_tale()
    plant(tale)

    assert rule in {violation.rule for violation in check(tale.history.events)}


def test_what_is_granted_before_and_after_a_claim_or_out_of_sight_is_no_violation() -> None:
    tale = good_tale()
    for ends in ({"tenant": "turning", "count": 1}, None):
        tale.record_observation("acquired", "l-9")
        tale.record_observation("claimant", claimant={"tenant": "gangs", "count": 16})
        tale.record_observation("lease ended", "l-9")
        tale.record_observation("claimant", claimant=ends)
        tale.record_observation("acquired", "l-10")
    tale.record_observation("claimant", claimant={"tenant": "gangs", "count": 16})
    tale.record_observation("missed")
    tale.record_observation("acquired", "l-11")

    assert check(tale.history.events) == []
    assert [claim.ended for claim in claims_seen(tale.history.events)] == [1, 1, 0]


def test_what_the_harness_caused_is_no_violation() -> None:
    tale = good_tale()
    tale.fault("disk.full")
    tale.note("died", status=3, began_at=tale.now, words="no room")
    tale.ran("l-2", "c-5")
    tale.result("l-2", "c-5", exit_code=FULL_DISK_EXIT)
    tale.fault("disk.free")
    tale.note("release", client=0, leases=["l-2"], run_id=None)
    tale.ran("l-2", "c-6")
    tale.result("l-2", "c-6", "cancelled")
    tale.wait(TTL_S)
    tale.grant("l-3", epoch=3)
    tale.wait(TTL_S)
    tale.lose("l-3", "lease_lost")
    tale.grant("l-4", epoch=4)

    assert check(tale.history.events) == []


def test_a_story_is_what_mentions_it_and_the_faults_meanwhile() -> None:
    events = good_tale().history.events

    lease = list(about(events, {"c-9", "l-9"}))

    assert [event.kind for event in lease] == ["granted", "fault", "result"]
    assert list(about(events, {"no such thing"})) == []


def test_events_read_as_lines() -> None:
    assert str(Event(1.5, "fault", {"what": "cut", "connections": 3})) == '    1.500 fault            what="cut" connections=3'
