"""The model: what a history of the clients must never show. It reads events and nothing else.

Kinds of events and their fields (`asked_at`: when the request whose answer this is was sent):
    granted      client, key, asked_at, ttl_s, leases: [{lease_id, sandbox_id, slot_id, epoch}]
    refused      client, key, asked_at, began_at (of the first attempt), ttl_s, status, code, detail
    result       client, lease_id, call_id, asked_at, result: the document
    renewed      client, asked_at, ttl_s, leases: [lease_id], lost: [{lease_id, code, detail}]
    release      client, leases: [lease_id]; the wish, before it is sent
    released     client, leases, released, unknown
    problem      client, verb, leases, status, code, detail: an answer that no request of the harness deserves
    unfinished   client, verb, names: no answer came in the quiet time after the last fault
    witness      word: `ran` or `ghost`, call_id, lease_id: a line that a command sent from inside its slot
    fault        what, ...: `agent.kill` has a sandbox_id; `disk.full` and `disk.free` are the ends of an interval
    died         status: the service ended without being told to
    seen         what: `claimant`, `acquired`, `lease ended` or `missed`, lease_id, claimant: what the service told of, in its order
    leak         what: something is left when all is over
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from tests.faults.claims import claims_seen
from tests.faults.history import Event

FULL_DISK_EXIT = 98
"""What a command of the harness exits with when it cannot write."""
LATE_S = 1.0
"""How long a line of a witness may be on its way, in seconds."""
NOT_FINAL = frozenset({"backend_error"})
GONE = frozenset({"lease_lost", "sandbox_lost"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Violation:
    """A promise that was not kept.

    Args:
        rule: which one, in short.
        detail: how.
        names: the ids whose events tell the story.
    """

    rule: str
    detail: str
    names: tuple[str, ...]


@dataclass(kw_only=True, slots=True)
class Story:
    """One lease, as its holder knows it. Times as in the history.

    Args:
        told: (when an answer came, until when it promised the lease at least).
        ended_at: when its holder gave it up or heard of its end.
        wished: when its holder wished its end; None: never.
    """

    lease_id: str
    sandbox_id: str
    slot: tuple[str, str]
    epoch: int
    granted_at: float
    client: int
    told: list[tuple[float, float]] = field(default_factory=list)
    ended_at: float = float("inf")
    wished: float | None = None

    def surely_until(self) -> float:
        """Until when it was held beyond doubt."""
        return min(self.ended_at, max(until for _, until in self.told))

    def promised_at(self, when: float) -> float:
        """Until when it was promised by what had been answered by then."""
        return max((until for told_at, until in self.told if told_at <= when), default=float("-inf"))


class Model:
    """A history, read once and sorted by what it is about."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = events
        self.by_kind: dict[str, list[Event]] = defaultdict(list)
        for event in events:
            self.by_kind[event.kind].append(event)
        self.stories: dict[str, Story] = {}
        self.killed: dict[str, float] = {}
        for event in self.by_kind["fault"]:
            if event["what"] == "agent.kill":
                self.killed.setdefault(event["sandbox_id"], event.at)
        self.results: dict[tuple[str, str], list[Event]] = defaultdict(list)
        for event in self.by_kind["result"]:
            self.results[event["lease_id"], event["call_id"]].append(event)
        self.ran: dict[str, list[Event]] = defaultdict(list)
        for event in self.by_kind["witness"]:
            if event["word"] == "ran":
                self.ran[event["call_id"]].append(event)
        for event in events:
            self._follow(event)

    def _follow(self, event: Event) -> None:
        if event.kind == "granted":
            for lease in event["leases"]:
                story = self.stories.get(lease["lease_id"])
                if story is None:
                    story = self.stories[lease["lease_id"]] = Story(
                        lease_id=lease["lease_id"],
                        sandbox_id=lease["sandbox_id"],
                        slot=(lease["sandbox_id"], lease["slot_id"]),
                        epoch=lease["epoch"],
                        granted_at=event.at,
                        client=event["client"],
                    )
                    # An attempt whose answer was lost may have been the one that was granted.
                    story.told.append((event.at, event["began_at"] + event["ttl_s"]))
        elif event.kind == "renewed":
            for lease_id in event["leases"]:
                self.stories[lease_id].told.append((event.at, event["asked_at"] + event["ttl_s"]))
            for lost in event["lost"]:
                self._ended(lost["lease_id"], event.at)
        elif event.kind == "release":
            for lease_id in event["leases"]:
                self._ended(lease_id, event.at)
                story = self.stories[lease_id]
                story.wished = story.wished if story.wished is not None else event.at
        elif event.kind == "result" and event["result"]["reason"] in GONE:
            self._ended(event["lease_id"], event.at)

    def _ended(self, lease_id: str, when: float) -> None:
        story = self.stories[lease_id]
        story.ended_at = min(story.ended_at, when)

    def disk_was_full(self, start: float, end: float) -> bool:
        """Whether the disk was full at any time between these two."""
        full_since: float | None = None
        for event in self.by_kind["fault"]:
            if event["what"] == "disk.full":
                full_since = full_since if full_since is not None else event.at
            elif event["what"] == "disk.free" and full_since is not None:
                # What was written just before the room came back may be heard of later.
                if full_since <= end and start <= event.at + LATE_S:
                    return True
                full_since = None
        return full_since is not None and full_since <= end


def check(events: Sequence[Event]) -> list[Violation]:
    """Every promise that this history breaks."""
    model = Model(events)
    rules = (holders, grants, runs, result_store, endings, answers, markers, ghosts, claims, ends)
    return [violation for rule in rules for violation in rule(model)]


def holders(model: Model) -> Iterator[Violation]:
    """No slot with two holders, and no epoch of a slot given twice; epochs grow."""
    by_slot: dict[tuple[str, str], list[Story]] = defaultdict(list)
    for story in model.stories.values():
        by_slot[story.slot].append(story)
    for slot, stories in by_slot.items():
        stories.sort(key=lambda story: story.granted_at)
        for first, second in pairwise(stories):
            names = (first.lease_id, second.lease_id)
            if second.granted_at < first.surely_until():
                detail = (
                    f"slot {slot} was granted to {second.lease_id} at {second.granted_at:.3f}, and {first.lease_id} held it until {first.surely_until():.3f}"
                )
                yield Violation(rule="two holders", detail=detail, names=names)
        for first, second in pairwise(sorted(stories, key=lambda story: story.epoch)):
            if first.epoch == second.epoch:
                yield Violation(rule="epoch used twice", detail=f"slot {slot}, epoch {first.epoch}", names=(first.lease_id, second.lease_id))
            elif second.surely_until() <= first.granted_at and second.granted_at < first.granted_at - LATE_S:
                detail = f"slot {slot}: epoch {first.epoch} was granted after epoch {second.epoch}"
                yield Violation(rule="epoch went back", detail=detail, names=(first.lease_id, second.lease_id))


def grants(model: Model) -> Iterator[Violation]:
    """A request key answers the same leases each time, and no two keys the same lease."""
    by_key: dict[str, list[str]] = {}
    key_of: dict[str, str] = {}
    for event in model.by_kind["granted"]:
        lease_ids = [lease["lease_id"] for lease in event["leases"]]
        first = by_key.setdefault(event["key"], lease_ids)
        if first != lease_ids:
            yield Violation(rule="request key answered otherwise", detail=f"key {event['key']}: {first}, then {lease_ids}", names=(event["key"],))
        for lease_id in lease_ids:
            if key_of.setdefault(lease_id, event["key"]) != event["key"]:
                yield Violation(rule="lease granted twice", detail=f"{lease_id} by {key_of[lease_id]} and {event['key']}", names=(lease_id,))


def runs(model: Model) -> Iterator[Violation]:
    """No call runs twice; what is said to have ended by itself has run; what is said not to have run has not."""
    for call_id, seen in model.ran.items():
        if len(seen) > 1:
            yield Violation(rule="call ran twice", detail=f"{call_id} was witnessed {len(seen)} times", names=(call_id, seen[0]["lease_id"]))
    for (lease_id, call_id), told in model.results.items():
        seen = model.ran.get(call_id, [])
        for event in told:
            result = event["result"]
            if result["reason"] == "exit" and not seen:
                yield Violation(rule="result without a run", detail=f"{call_id} says exit {result['exit_code']} and was never witnessed", names=(call_id,))
                break
            if result["metadata"].get("may_have_run") is False and seen and seen[0].at < event["asked_at"]:
                detail = (
                    f"{call_id} was witnessed at {seen[0].at:.3f}, and {result['reason']} at {event.at:.3f} says that it cannot have run: {result['error']}"
                )
                yield Violation(rule="denied a run", detail=detail, names=(call_id, lease_id))
                break


def result_store(model: Model) -> Iterator[Violation]:
    """A result that was told once is told again, as long as its lease lives; and it is one that the harness has given cause for."""
    for (lease_id, call_id), told in model.results.items():
        final = [event for event in told if event["result"]["reason"] not in NOT_FINAL]
        for first, second in pairwise(final):
            if second["result"]["reason"] == "lease_lost" and _may_be_over(model, lease_id, second.at):
                break
            if first["result"] != second["result"]:
                changed = [name for name in first["result"] if first["result"][name] != second["result"].get(name)]
                detail = f"{call_id}: {[(name, first['result'][name], second['result'].get(name)) for name in changed]}"
                yield Violation(rule="result changed", detail=detail[:2000], names=(call_id, lease_id))
                break
        for event in final[:1]:
            yield from _undeserved(model, lease_id, event)


def _undeserved(model: Model, lease_id: str, event: Event) -> Iterator[Violation]:
    result, story = event["result"], model.stories[lease_id]
    reason, names = result["reason"], (event["call_id"], lease_id)
    if reason == "exit":
        fine = result["exit_code"] == 0 or (result["exit_code"] == FULL_DISK_EXIT and model.disk_was_full(event["began_at"], event.at))
    elif reason == "sandbox_lost":
        fine = model.killed.get(story.sandbox_id, float("inf")) <= event.at
    elif reason in ("cancelled", "lease_lost"):
        fine = _may_be_over(model, lease_id, event.at)
    else:
        fine = False
    if not fine:
        rule = "lease lost" if reason in GONE else "undeserved result"
        said = f"{result['error']} {result['output'][:300]}".strip()
        yield Violation(rule=rule, detail=f"{event['call_id']} of {lease_id}: {reason}, exit code {result['exit_code']}: {said}", names=names)


def _may_be_over(model: Model, lease_id: str, when: float) -> bool:
    """Whether the lease may have ended by then: its holder wished it, it was not renewed, or its sandbox was killed."""
    story = model.stories[lease_id]
    wished = story.wished is not None and story.wished <= when
    return wished or story.promised_at(when) <= when or model.killed.get(story.sandbox_id, float("inf")) <= when


def endings(model: Model) -> Iterator[Violation]:
    """No acknowledged lease is lost without a reason that the contract names."""
    for event in model.by_kind["renewed"]:
        for lost in event["lost"]:
            yield from _ending(model, lost["lease_id"], event.at, lost["code"], lost["detail"])
    for event in model.by_kind["refused"]:
        if (
            event["code"] in GONE
            and event.at < event["began_at"] + event["ttl_s"]
            and not any(event["began_at"] <= at <= event.at for at in model.killed.values())
        ):
            yield Violation(rule="lease lost", detail=f"key {event['key']}: {event['detail']}", names=(event["key"],))
    for event in model.by_kind["released"]:
        for lease_id in event["leases"]:
            if lease_id not in event["released"]:
                yield Violation(rule="lease forgotten", detail=f"{lease_id} is unknown to release", names=(lease_id,))


def _ending(model: Model, lease_id: str, when: float, code: str, detail: str) -> Iterator[Violation]:
    killed = model.killed.get(model.stories[lease_id].sandbox_id, float("inf")) <= when
    fine = killed if code == "sandbox_lost" else code == "lease_lost" and _may_be_over(model, lease_id, when)
    if not fine:
        yield Violation(rule="lease lost", detail=f"{lease_id}: {code}: {detail}", names=(lease_id,))


def answers(model: Model) -> Iterator[Violation]:
    """No answer that no request deserves, no request without an answer, no service that ends by itself."""
    for event in model.by_kind["problem"]:
        detail = f"{event['verb']} of {event['leases']}: {event['status']} {event['code']}: {event['detail']}"
        yield Violation(rule="undeserved answer", detail=detail, names=tuple(event["leases"]))
    for event in model.by_kind["unfinished"]:
        yield Violation(rule="no answer", detail=f"client {event['client']} still waits for {event['verb']}: {event['last']}", names=tuple(event["names"]))
    for event in model.by_kind["died"]:
        if not model.disk_was_full(event["began_at"], event.at):
            yield Violation(rule="service died", detail=f"status {event['status']}: {event['words']}", names=())


def markers(model: Model) -> Iterator[Violation]:
    """Each holder finds in its workspace its own marks and nothing else's, and every call of it that ended, once, in their order."""
    asked: dict[str, set[str]] = defaultdict(set)
    ended: dict[str, list[Event]] = defaultdict(list)
    for (lease_id, call_id), told in model.results.items():
        asked[lease_id].add(call_id)
        ended[lease_id].extend([event for event in told if event["result"]["reason"] == "exit" and event["result"]["exit_code"] == 0][:1])
    for lease_id, found in ended.items():
        found.sort(key=lambda event: event.at)
        earlier: list[Event] = []
        for event in found:
            names = (event["call_id"], lease_id)
            seen = read_output(event["result"]["output"])
            strange = {seen["holder"], seen["mark"]} - {"", lease_id} or set(seen["files"]) - {"holder", "log"} or set(seen["log"]) - asked[lease_id]
            if strange:
                yield Violation(rule="foreign marks", detail=f"{event['call_id']} found {sorted(strange)} in the slot of {lease_id}", names=names)
            twice = [call_id for call_id, times in Counter(seen["log"]).items() if times > 1]
            before = [other["call_id"] for other in earlier if other.at < event["began_at"]]
            missing = [call_id for call_id in [*before, event["call_id"]] if call_id not in seen["log"]]
            if twice or missing:
                yield Violation(rule="log of the workspace", detail=f"{event['call_id']}: twice {twice}, missing {missing}", names=names)
            earlier.append(event)


def read_output(output: str) -> dict[str, Any]:
    """What a command of the harness printed of its slot."""
    seen: dict[str, Any] = {"holder": "", "mark": "", "files": [], "log": []}
    for line in output.splitlines():
        name, _, value = line.partition("=")
        if name in ("holder", "mark"):
            seen[name] = value
        elif name in ("files", "log"):
            seen[name] = value.split()
    return seen


def ghosts(model: Model) -> Iterator[Violation]:
    """Nothing of an earlier holder runs once the slot has another."""
    by_slot: dict[tuple[str, str], list[Story]] = defaultdict(list)
    for story in model.stories.values():
        by_slot[story.slot].append(story)
    for event in model.by_kind["witness"]:
        owner = model.stories.get(event["lease_id"])
        for other in by_slot[owner.slot] if owner is not None else ():
            if owner is not None and other.epoch > owner.epoch and event.at > other.granted_at + LATE_S:
                since = f"when the slot was {other.lease_id}'s since {other.granted_at:.3f}"
                detail = f"{event['word']} {event['call_id']} of {owner.lease_id} at {event.at:.3f}, {since}"
                yield Violation(rule="ghost", detail=detail, names=(event["call_id"], owner.lease_id, other.lease_id))
                break


def claims(model: Model) -> Iterator[Violation]:
    """While what comes free is held for a claimant, nobody else is granted it. No client of the harness has slots kept."""
    for claim in claims_seen(model.events):
        for lease_id in claim.granted:
            detail = f"{lease_id} was granted while slots were held since {claim.began_at:.3f} for {claim.claimant}"
            yield Violation(rule="granted past the claimant", detail=detail, names=(lease_id,))


def ends(model: Model) -> Iterator[Violation]:
    """Nothing is left over."""
    for event in model.by_kind["leak"]:
        yield Violation(rule="leak", detail=event["what"], names=())
