"""The checker: finds every broken promise in the history of a run. It reads the events and nothing else.

The kinds of events and their fields (`asked_at` is when the request was sent whose response is recorded):
    granted      client, key, asked_at, ttl_s, leases: [{lease_id, sandbox_id, slot_id, epoch}]
    refused      client, key, asked_at, began_at (of the first attempt), ttl_s, status, code, detail
    result       client, lease_id, call_id, asked_at, result: the document
    renewed      client, asked_at, ttl_s, leases: [lease_id], lost: [{lease_id, code, detail}]
    release      client, leases: [lease_id]; recorded before the request is sent
    released     client, leases, released, unknown
    problem      client, verb, leases, status, code, detail: an error response that no request of the harness should get
    unfinished   client, verb, names: no response came in the quiet time after the last fault
    witness      word: `ran` or `ghost`, call_id, lease_id: a line that a command sent from inside its slot
    fault        what, ...: `agent.kill` has a sandbox_id; `disk.full` and `disk.free` are the ends of an interval
    died         status: the service ended although nobody stopped it
    seen         what: `claimant`, `acquired`, `lease ended` or `missed`, lease_id, claimant: an event of the service's own stream, in its order
    leak         what: something that is left after the run
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from tests.faults.clients.claims import claims_seen
from tests.faults.history import Event

FULL_DISK_EXIT = 98
"""The exit code of a command of the harness that could not write to its disk."""
WITNESS_DELAY_S = 1.0
"""How long a line may take from a command to the witness, in seconds."""
NOT_FINAL = frozenset({"backend_error"})
LEASE_ENDED = frozenset({"lease_lost", "sandbox_lost"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Violation:
    """A promise that was not kept.

    Args:
        rule: which one, in short.
        detail: how.
        names: the ids whose events tell the record.
    """

    rule: str
    detail: str
    names: tuple[str, ...]


@dataclass(kw_only=True, slots=True)
class LeaseRecord:
    """One lease as its holder knows it. Times are those of the history.

    Args:
        promises: for each response, when it came and until when it promised the lease at least.
        ended_at: when the holder released it or received a response that says that it has ended.
        release_requested_at: when the holder asked for its release; None if it never did.
    """

    lease_id: str
    sandbox_id: str
    slot: tuple[str, str]
    epoch: int
    granted_at: float
    client: int
    promises: list[tuple[float, float]] = field(default_factory=list)
    ended_at: float = float("inf")
    release_requested_at: float | None = None

    def held_at_least_until(self) -> float:
        """Return until when the lease was certainly held."""
        return min(self.ended_at, max(until for _, until in self.promises))

    def promised_at(self, when: float) -> float:
        """Return until when the lease was promised by the responses that had come by a given time."""
        return max((until for answered_at, until in self.promises if answered_at <= when), default=float("-inf"))


class Model:
    """A history, indexed by lease, call, sandbox and kind of event."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = events
        self.by_kind: dict[str, list[Event]] = defaultdict(list)
        for event in events:
            self.by_kind[event.kind].append(event)
        self.leases: dict[str, LeaseRecord] = {}
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
            self._apply(event)

    def _apply(self, event: Event) -> None:
        if event.kind == "granted":
            for lease in event["leases"]:
                record = self.leases.get(lease["lease_id"])
                if record is None:
                    record = self.leases[lease["lease_id"]] = LeaseRecord(
                        lease_id=lease["lease_id"],
                        sandbox_id=lease["sandbox_id"],
                        slot=(lease["sandbox_id"], lease["slot_id"]),
                        epoch=lease["epoch"],
                        granted_at=event.at,
                        client=event["client"],
                    )
                    # The first attempt may have been the one that was granted, with its response lost.
                    record.promises.append((event.at, event["began_at"] + event["ttl_s"]))
        elif event.kind == "renewed":
            for lease_id in event["leases"]:
                self.leases[lease_id].promises.append((event.at, event["asked_at"] + event["ttl_s"]))
            for lost in event["lost"]:
                self._end_lease(lost["lease_id"], event.at)
        elif event.kind == "release":
            for lease_id in event["leases"]:
                self._end_lease(lease_id, event.at)
                record = self.leases[lease_id]
                record.release_requested_at = record.release_requested_at if record.release_requested_at is not None else event.at
        elif event.kind == "result" and event["result"]["reason"] in LEASE_ENDED:
            self._end_lease(event["lease_id"], event.at)

    def _end_lease(self, lease_id: str, when: float) -> None:
        record = self.leases[lease_id]
        record.ended_at = min(record.ended_at, when)

    def disk_was_full(self, start: float, end: float) -> bool:
        """Return whether the disk was full at any time between these two."""
        full_since: float | None = None
        for event in self.by_kind["fault"]:
            if event["what"] == "disk.full":
                full_since = full_since if full_since is not None else event.at
            elif event["what"] == "disk.free" and full_since is not None:
                # The result of a write just before space was freed may come later.
                if full_since <= end and start <= event.at + WITNESS_DELAY_S:
                    return True
                full_since = None
        return full_since is not None and full_since <= end


def check(events: Sequence[Event]) -> list[Violation]:
    """Return every promise that this history breaks."""
    model = Model(events)
    rules = (holders, grants, executions, stable_results, endings, responses, markers, processes_after_release, claims, leftovers)
    return [violation for rule in rules for violation in rule(model)]


def holders(model: Model) -> Iterator[Violation]:
    """Yield each slot with two holders at once, each epoch of a slot that was used twice, and each epoch that went back."""
    by_slot: dict[tuple[str, str], list[LeaseRecord]] = defaultdict(list)
    for record in model.leases.values():
        by_slot[record.slot].append(record)
    for slot, records in by_slot.items():
        records.sort(key=lambda record: record.granted_at)
        for first, second in pairwise(records):
            names = (first.lease_id, second.lease_id)
            if second.granted_at < first.held_at_least_until():
                until = first.held_at_least_until()
                detail = f"slot {slot} was granted to {second.lease_id} at {second.granted_at:.3f}, and {first.lease_id} held it until {until:.3f}"
                yield Violation(rule="two holders", detail=detail, names=names)
        for first, second in pairwise(sorted(records, key=lambda record: record.epoch)):
            if first.epoch == second.epoch:
                yield Violation(rule="epoch used twice", detail=f"slot {slot}, epoch {first.epoch}", names=(first.lease_id, second.lease_id))
            elif second.held_at_least_until() <= first.granted_at and second.granted_at < first.granted_at - WITNESS_DELAY_S:
                detail = f"slot {slot}: epoch {first.epoch} was granted after epoch {second.epoch}"
                yield Violation(rule="epoch went back", detail=detail, names=(first.lease_id, second.lease_id))


def grants(model: Model) -> Iterator[Violation]:
    """Yield each request key that was answered with different leases, and each lease that was granted for two keys."""
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


def executions(model: Model) -> Iterator[Violation]:
    """Yield each call that ran twice, each exit code of a call that never ran, and each `may_have_run: false` of a call that ran."""
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


def stable_results(model: Model) -> Iterator[Violation]:
    """Yield each result that changed while its lease was held, and each result that no action of the harness explains."""
    for (lease_id, call_id), told in model.results.items():
        final = [event for event in told if event["result"]["reason"] not in NOT_FINAL]
        for first, second in pairwise(final):
            if second["result"]["reason"] == "lease_lost" and _may_have_ended(model, lease_id, second.at):
                break
            if first["result"] != second["result"]:
                changed = [name for name in first["result"] if first["result"][name] != second["result"].get(name)]
                detail = f"{call_id}: {[(name, first['result'][name], second['result'].get(name)) for name in changed]}"
                yield Violation(rule="result changed", detail=detail[:2000], names=(call_id, lease_id))
                break
        for event in final[:1]:
            yield from _unexplained_result(model, lease_id, event)


def _unexplained_result(model: Model, lease_id: str, event: Event) -> Iterator[Violation]:
    result, record = event["result"], model.leases[lease_id]
    reason, names = result["reason"], (event["call_id"], lease_id)
    if reason == "exit":
        is_explained = result["exit_code"] == 0 or (result["exit_code"] == FULL_DISK_EXIT and model.disk_was_full(event["began_at"], event.at))
    elif reason == "sandbox_lost":
        is_explained = model.killed.get(record.sandbox_id, float("inf")) <= event.at
    elif reason in ("cancelled", "lease_lost"):
        is_explained = _may_have_ended(model, lease_id, event.at)
    else:
        is_explained = False
    if not is_explained:
        rule = "lease lost" if reason in LEASE_ENDED else "undeserved result"
        said = f"{result['error']} {result['output'][:300]}".strip()
        yield Violation(rule=rule, detail=f"{event['call_id']} of {lease_id}: {reason}, exit code {result['exit_code']}: {said}", names=names)


def _may_have_ended(model: Model, lease_id: str, when: float) -> bool:
    """Return whether the lease may have ended by then: it was released, it was not renewed, or its sandbox was killed."""
    record = model.leases[lease_id]
    wished = record.release_requested_at is not None and record.release_requested_at <= when
    return wished or record.promised_at(when) <= when or model.killed.get(record.sandbox_id, float("inf")) <= when


def endings(model: Model) -> Iterator[Violation]:
    """Yield each acknowledged lease that was lost without a reason that the contract names."""
    for event in model.by_kind["renewed"]:
        for lost in event["lost"]:
            yield from _unexplained_ending(model, lost["lease_id"], event.at, lost["code"], lost["detail"])
    for event in model.by_kind["refused"]:
        if (
            event["code"] in LEASE_ENDED
            and event.at < event["began_at"] + event["ttl_s"]
            and not any(event["began_at"] <= at <= event.at for at in model.killed.values())
        ):
            yield Violation(rule="lease lost", detail=f"key {event['key']}: {event['detail']}", names=(event["key"],))
    for event in model.by_kind["released"]:
        for lease_id in event["leases"]:
            if lease_id not in event["released"]:
                yield Violation(rule="lease forgotten", detail=f"{lease_id} is unknown to release", names=(lease_id,))


def _unexplained_ending(model: Model, lease_id: str, when: float, code: str, detail: str) -> Iterator[Violation]:
    killed = model.killed.get(model.leases[lease_id].sandbox_id, float("inf")) <= when
    is_explained = killed if code == "sandbox_lost" else code == "lease_lost" and _may_have_ended(model, lease_id, when)
    if not is_explained:
        yield Violation(rule="lease lost", detail=f"{lease_id}: {code}: {detail}", names=(lease_id,))


def responses(model: Model) -> Iterator[Violation]:
    """Yield each error response without a cause, each request without a response, and each end of the service by itself."""
    for event in model.by_kind["problem"]:
        detail = f"{event['verb']} of {event['leases']}: {event['status']} {event['code']}: {event['detail']}"
        yield Violation(rule="undeserved answer", detail=detail, names=tuple(event["leases"]))
    for event in model.by_kind["unfinished"]:
        yield Violation(rule="no answer", detail=f"client {event['client']} still waits for {event['verb']}: {event['last']}", names=tuple(event["names"]))
    for event in model.by_kind["died"]:
        if not model.disk_was_full(event["began_at"], event.at):
            yield Violation(rule="service died", detail=f"status {event['status']}: {event['words']}", names=())


def markers(model: Model) -> Iterator[Violation]:
    """Yield each call that found marks of another holder in its workspace, or not exactly the earlier calls of its own lease in their order."""
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
    """Return what a command of the harness printed about its slot."""
    seen: dict[str, Any] = {"holder": "", "mark": "", "files": [], "log": []}
    for line in output.splitlines():
        name, _, value = line.partition("=")
        if name in ("holder", "mark"):
            seen[name] = value
        elif name in ("files", "log"):
            seen[name] = value.split()
    return seen


def processes_after_release(model: Model) -> Iterator[Violation]:
    """Yield each command of an earlier holder that was witnessed after the slot had another holder."""
    by_slot: dict[tuple[str, str], list[LeaseRecord]] = defaultdict(list)
    for record in model.leases.values():
        by_slot[record.slot].append(record)
    for event in model.by_kind["witness"]:
        owner = model.leases.get(event["lease_id"])
        for other in by_slot[owner.slot] if owner is not None else ():
            if owner is not None and other.epoch > owner.epoch and event.at > other.granted_at + WITNESS_DELAY_S:
                since = f"when the slot was {other.lease_id}'s since {other.granted_at:.3f}"
                detail = f"{event['word']} {event['call_id']} of {owner.lease_id} at {event.at:.3f}, {since}"
                yield Violation(rule="ghost", detail=detail, names=(event["call_id"], owner.lease_id, other.lease_id))
                break


def claims(model: Model) -> Iterator[Violation]:
    """Yield each lease that was granted to another tenant while free slots were held for a claimant. No client of the harness keeps slots of its own."""
    for claim in claims_seen(model.events):
        for lease_id in claim.granted:
            detail = f"{lease_id} was granted while slots were held since {claim.began_at:.3f} for {claim.claimant}"
            yield Violation(rule="granted past the claimant", detail=detail, names=(lease_id,))


def leftovers(model: Model) -> Iterator[Violation]:
    """Yield each thing that is left after the run."""
    for event in model.by_kind["leak"]:
        yield Violation(rule="leak", detail=event["what"], names=())
