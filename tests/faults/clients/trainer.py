"""One client of the load: it acquires, executes, renews and releases as a trainer does, retries until it has a response, and records everything."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.faults.checker import NOT_FINAL
from tests.faults.clients.commands import Command
from tests.faults.history import History

PASSING = frozenset({"storage_unavailable", "backend_unavailable", "draining", "quota_exceeded"})
ENDED = frozenset({"lease_lost", "sandbox_lost"})
RETRY_AFTER_S = (0.05, 0.3)
TTL_S = 20.0
SHORT_TTL_S = 2.0
RENEW_EVERY_S = 4.0
WAIT_S = 5.0
CALL_TIMEOUT_S = 60.0
READ_TIMEOUT_S = 90.0


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant: its connections to the service, through the proxy, and the headers of its requests."""

    http: httpx.AsyncClient
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Answer:
    """The final response to a request, and when it was asked for."""

    asked_at: float
    began_at: float
    status: int
    body: Mapping[str, Any]


@dataclass(kw_only=True, slots=True)
class HeldLeases:
    """The leases of one acquire, and what was done with them."""

    leases: list[Mapping[str, Any]]
    ttl_s: float
    run_id: str | None
    ended: set[str] = field(default_factory=set)
    asked: list[dict[str, Any]] = field(default_factory=list)

    def held(self) -> list[str]:
        """Return the ids of the leases that have not ended as far as the client knows."""
        return [lease["lease_id"] for lease in self.leases if lease["lease_id"] not in self.ended]


class Trainer:
    """A client.

    Args:
        number: the number of the client. With the seed it decides what the client does.
        seed: the seed of the run.
        tenant: the tenant of its requests.
        history: requests and responses are recorded there.
        stopping: once it is set, the client acquires no more.
        witness_port: the port to which its commands report that they run.
        gang: how many slots it acquires at once; None: a few.
        wait_s: how long each acquire waits for its slots, in seconds.
    """

    def __init__(
        self,
        number: int,
        seed: int,
        tenant: Tenant,
        history: History,
        stopping: asyncio.Event,
        witness_port: int,
        *,
        gang: int | None = None,
        wait_s: float = WAIT_S,
    ) -> None:
        self.number = number
        self.waits_for: dict[str, tuple[str, ...]] = {}
        self.last = ""
        self._tenant = tenant
        self._history = history
        self._stopping = stopping
        self._witness_port = witness_port
        self._gang = gang
        self._wait_s = wait_s
        self._chance = random.Random(f"client {number} of {seed}")
        # Delays come from a generator of their own: how many there are depends on the machine, and must not change what the client does.
        self._jitter = random.Random(f"delays of {number} of {seed}")
        self._made = 0

    async def run(self) -> None:
        """Acquire, execute and release, again and again, until `stopping` is set."""
        while not self._stopping.is_set():
            await self._round()

    def _name(self, what: str) -> str:
        self._made += 1
        return f"{what}{self.number}.{self._made}"

    # Requests.

    async def _ask(self, verb: str, path: str, body: Mapping[str, Any], names: Sequence[str]) -> Answer:
        """Send a request, and repeat it while the response is missing or names an obstacle that passes."""
        began_at = self._history.now()
        ticket = self._name("ask")
        self.waits_for[ticket] = (verb, *names)
        while True:
            asked_at = self._history.now()
            try:
                response = await self._tenant.http.post(path, json=body, headers=self._tenant.headers)
                answer = Answer(asked_at, began_at, response.status_code, response.json())
                obstacle = answer.body.get("code") if answer.body.get("code") in PASSING else None
            except (httpx.TransportError, ValueError) as error:
                obstacle = f"{type(error).__name__}: {error}"
            if obstacle is None:
                del self.waits_for[ticket]
                return answer
            self.last = str(obstacle)
            self._history.note("again", client=self.number, verb=verb, names=list(names), asked_at=asked_at, why=obstacle)
            await asyncio.sleep(self._jitter.uniform(*RETRY_AFTER_S))

    def _problem(self, verb: str, answer: Answer, lease_ids: Sequence[str]) -> None:
        body = answer.body
        said = {"status": answer.status, "code": body.get("code"), "detail": body.get("detail")}
        self._history.note("problem", client=self.number, verb=verb, leases=list(lease_ids), asked_at=answer.asked_at, **said)

    # Leases and calls.

    async def _round(self) -> None:
        chance = self._chance
        count = chance.choice((1, 1, 1, 1, 2, 3)) if self._gang is None else self._gang
        run_id = self._name("run") if chance.random() < 0.3 else None
        walks_away = chance.random() < 0.12
        ttl_s = SHORT_TTL_S if walks_away else TTL_S
        body = {"count": count, "ttl_s": ttl_s, "wait_s": self._wait_s, "request_key": self._name("key"), "run_id": run_id}
        asks_twice, actions = chance.random() < 0.15, chance.randint(1, 5)
        held = await self._acquire(body)
        if held is None:
            return
        if asks_twice:
            await self._acquire(body)
        renewing = asyncio.create_task(self._keep_renewing(held)) if not walks_away else None
        try:
            for _ in range(actions):
                if held.held() and not self._stopping.is_set():
                    await self._act(held)
        finally:
            if renewing is not None:
                renewing.cancel()
                with suppress(asyncio.CancelledError):
                    await renewing
        if not walks_away:
            await self._end(held)

    async def _acquire(self, body: Mapping[str, Any]) -> HeldLeases | None:
        key, ttl_s = body["request_key"], body["ttl_s"]
        answer = await self._ask("acquire", "/v1/acquire", body, [key])
        fields = {"client": self.number, "key": key, "count": body["count"], "asked_at": answer.asked_at, "began_at": answer.began_at, "ttl_s": ttl_s}
        if answer.status == httpx.codes.OK:
            names = ("lease_id", "sandbox_id", "slot_id", "epoch", "isolation")
            self._history.note("granted", **fields, leases=[{name: lease[name] for name in names} for lease in answer.body["leases"]])
            return HeldLeases(leases=list(answer.body["leases"]), ttl_s=ttl_s, run_id=body["run_id"])
        code = answer.body.get("code")
        self._history.note("refused", **fields, status=answer.status, code=code, detail=answer.body.get("detail"))
        if code not in ENDED | {"no_capacity"}:
            self._problem("acquire", answer, [])
        return None

    async def _act(self, held: HeldLeases) -> None:
        """Do one of the things that a holder of leases does: call, call twice at once, call many, or repeat an earlier call."""
        chance = self._chance
        lease_ids = held.held()
        what = chance.random()
        if what < 0.12 and held.asked:
            await self._exec(held, [chance.choice(held.asked)])
        elif what < 0.22:
            call = self._call(held, chance.choice(lease_ids))
            await asyncio.gather(self._exec(held, [call]), self._exec(held, [call]))
        elif what < 0.45:
            await self._exec(held, [self._call(held, lease_id) for lease_id in lease_ids for _ in range(chance.randint(1, 3))])
        else:
            await self._exec(held, [self._call(held, chance.choice(lease_ids))])

    def _call(self, held: HeldLeases, lease_id: str, sleep_s: float | None = None) -> dict[str, Any]:
        chance = self._chance
        lease = next(lease for lease in held.leases if lease["lease_id"] == lease_id)
        if sleep_s is None:
            sleep_s = round(chance.uniform(0.1, 2.0), 2) if chance.random() < 0.3 else 0.0
        call_id = self._name("call")
        command = Command(
            call_id=call_id,
            lease_id=lease_id,
            witness_port=self._witness_port,
            sleep_s=sleep_s,
            ghost_s=3.0 if chance.random() < 0.1 else 0.0,
            private_tmp=lease["isolation"] == "bwrap",
        )
        call = {"call_id": call_id, "lease_id": lease_id, "tool": "bash", "args": {"command": command.text()}, "timeout_s": CALL_TIMEOUT_S}
        held.asked.append(call)
        return call

    async def _exec(self, held: HeldLeases, calls: Sequence[Mapping[str, Any]]) -> None:
        """Request calls until each has a final result."""
        waiting, began_at = list(calls), self._history.now()
        while waiting:
            answer = await self._ask("exec", "/v1/exec-batch", {"calls": waiting}, [call["call_id"] for call in waiting])
            if answer.status != httpx.codes.OK:
                self._problem("exec", answer, [call["lease_id"] for call in waiting])
                return
            again = []
            for call, result in zip(waiting, answer.body["results"], strict=True):
                self._history.note(
                    "result",
                    client=self.number,
                    lease_id=call["lease_id"],
                    call_id=call["call_id"],
                    asked_at=answer.asked_at,
                    began_at=began_at,
                    result=result,
                )
                if result["reason"] in NOT_FINAL:
                    again.append(call)
                elif result["reason"] in ENDED:
                    held.ended.add(call["lease_id"])
            if again:
                self.last = "backend_error"
                await asyncio.sleep(self._jitter.uniform(*RETRY_AFTER_S))
            waiting = again

    # Renewal and release.

    async def _keep_renewing(self, held: HeldLeases) -> None:
        while True:
            await asyncio.sleep(RENEW_EVERY_S)
            lease_ids = held.held()
            if not lease_ids:
                return
            answer = await self._ask("renew", "/v1/renew", {"lease_ids": lease_ids, "ttl_s": held.ttl_s}, lease_ids)
            if answer.status != httpx.codes.OK:
                self._problem("renew", answer, lease_ids)
                continue
            renewed, lost = [lease["lease_id"] for lease in answer.body["leases"]], answer.body["lost"]
            self._history.note("renewed", client=self.number, asked_at=answer.asked_at, ttl_s=held.ttl_s, leases=renewed, lost=lost)
            held.ended.update(one["lease_id"] for one in lost)

    async def _end(self, held: HeldLeases) -> None:
        """Release everything, sometimes while a call runs, and sometimes try a call afterwards."""
        lease_ids = [lease["lease_id"] for lease in held.leases]
        running = None
        if self._chance.random() < 0.15 and held.held():
            running = asyncio.create_task(self._exec(held, [self._call(held, held.held()[0], sleep_s=3.0)]))
            await asyncio.sleep(self._chance.uniform(0.0, 0.4))
        by_run = held.run_id is not None and self._chance.random() < 0.5
        body = {"run_id": held.run_id} if by_run else {"lease_ids": lease_ids}
        self._history.note("release", client=self.number, leases=lease_ids, run_id=held.run_id)
        answer = await self._ask("release", "/v1/release", body, lease_ids)
        if answer.status != httpx.codes.OK:
            self._problem("release", answer, lease_ids)
        else:
            # A run that is released again has none left to name.
            owed = [] if by_run else lease_ids
            self._history.note("released", client=self.number, leases=owed, released=answer.body["released"], unknown=answer.body["unknown"])
            if self._chance.random() < 0.2:
                await self._exec(held, [self._call(held, lease_ids[0])])
        if running is not None:
            await running
