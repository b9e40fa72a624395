"""One run of the crash harness: load and faults at once, then a quiet time in which every client finishes, the stop of the service, and the checks."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

import httpx

from tests.faults.checker import Violation, check
from tests.faults.clients.claims import claims_seen
from tests.faults.clients.event_follower import follow_events
from tests.faults.clients.trainer import READ_TIMEOUT_S, Tenant, Trainer
from tests.faults.clients.witness import witness
from tests.faults.history import Event, History
from tests.faults.leaks import leaks
from tests.faults.proxy import Proxy
from tests.faults.schedule import Fault, schedule
from tests.faults.service_under_test import ServiceUnderTest, signal_agent

TENANTS: Final[Sequence[Mapping[str, Any]]] = (
    {"name": "turning", "token": "the-token-of-those-who-keep-their-share-turning", "admin": True},
    {"name": "gangs", "token": "the-token-of-the-gangs"},
)
"""One tenant that acquires and releases all the time, and one whose gangs would get nothing beside it if the service were not fair."""
CLAIM_AFTER_S = 2.0
LOAD_AFTER_FAULTS_S = 1.0
"""How long the load goes on after the last of a given number of faults, in seconds, once the service is ready again."""
QUIET_S = 60.0
"""How long after the last fault each request may take, in seconds."""
START_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How large the pool and the load of a run are.

    Args:
        clients: how many clients acquire a few slots at a time.
        gangs: how many clients acquire a gang at a time, in addition to the others.
        gang: how many slots a gang has: more than any other client acquires, and most of those that the pool can have.
        gang_wait_s: how long an acquire of a gang waits for its slots, in seconds. A run ends no earlier than the acquires that wait at its end.
        slots_per_sandbox: how many slots a sandbox of the pool has.
        max_sandboxes: how many sandboxes the pool may have.
    """

    clients: int
    gangs: int = 2
    gang: int = 16
    gang_wait_s: float = 40.0
    slots_per_sandbox: int = 5
    max_sandboxes: int = 5

    def pools(self) -> dict[str, Any]:
        """Return the pools of the settings file."""
        pool = {
            "backend": "local",
            "slots_per_sandbox": self.slots_per_sandbox,
            "min_sandboxes": 2,
            "max_sandboxes": self.max_sandboxes,
            "idle_timeout_s": 10,
            "on_shutdown": "destroy",
        }
        return {"default": pool}


@dataclass(kw_only=True)
class Report:
    """The outcome of a run.

    Args:
        seed, seconds: of the run.
        history: all events.
        violations: the broken promises.
        figures: counts for the report.
        left_out: the kinds of fault and the checks that this machine does not allow, each with its reason.
        log: what the service wrote.
    """

    seed: int
    seconds: float
    history: History
    violations: list[Violation]
    figures: dict[str, int] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    log: str = ""


class CrashHarness:
    """The real service under load, while faults are injected.

    Args:
        seed: decides what the clients do and which faults come when.
        seconds: how long load and faults last.
        size: the pool and the number of clients.
        transport: how the service reaches its agents: `unix`, `tls` or `stdio`.
        max_faults: after how many faults the run ends, if that is before `seconds`; None: it lasts for `seconds`.
    """

    def __init__(self, seed: int, seconds: float, size: Size, transport: str = "unix", *, max_faults: int | None = None) -> None:
        self._seed = seed
        self._seconds = seconds
        self._size = size
        self._max_faults = max_faults
        self._history = History()
        settings = {"pools": size.pools(), "tenants": list(TENANTS), "claim_after_s": CLAIM_AFTER_S}
        jumps = max_faults is None or any(fault.what == "clock.jump" for fault in islice(schedule(seed), max_faults))
        self._service = ServiceUnderTest(self._history, settings, transport, fakes_clock=jumps)
        self._proxy = Proxy(self._service.port)
        self._temporary_faults: set[asyncio.Task[None]] = set()
        self._fills = 0

    async def run(self) -> Report:
        """Run load and faults, check the history, and remove what the harness created.

        Returns:
            The outcome.
        """
        service = self._service
        try:
            async with AsyncExitStack() as stack:
                witness_port = await stack.enter_async_context(witness(self._history))
                await stack.enter_async_context(self._proxy.running())
                keep_running_task = asyncio.create_task(service.keep_running())
                follow_task = asyncio.create_task(follow_events(f"http://127.0.0.1:{service.port}", headers(TENANTS[0]), self._history))
                try:
                    async with asyncio.timeout(START_TIMEOUT_S):
                        await service.up.wait()
                    await self._load(witness_port)
                finally:
                    await self._wait_for_temporary_faults()
                    service.read_sandbox_records()
                    follow_task.cancel()
                    await service.stop(keep_running_task)
                    await asyncio.wait([follow_task])
            for leak in await leaks(service.state_dir, service.sandbox_records):
                self._history.note("leak", what=leak)
            log = service.log_path.read_text(encoding="utf-8", errors="replace")
        finally:
            service.close()
        report = Report(seed=self._seed, seconds=self._seconds, history=self._history, violations=check(self._history.events), log=log)
        report.figures = figures(self._history.events, report.violations, starts=service.starts, gang=self._size.gang)
        report.left_out = left_out(self._history.events, service.impossible())
        return report

    async def _load(self, witness_port: int) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        stopping = asyncio.Event()
        async with httpx.AsyncClient(base_url=self._proxy.url, timeout=READ_TIMEOUT_S, limits=limits, trust_env=False) as http:
            turning, gangs = (Tenant(http, headers(tenant)) for tenant in TENANTS)
            size, common = self._size, (self._history, stopping, witness_port)
            trainers = [Trainer(number, self._seed, turning, *common) for number in range(size.clients)]
            gang_numbers = range(size.clients, size.clients + size.gangs)
            trainers += [Trainer(number, self._seed, gangs, *common, gang=size.gang, wait_s=size.gang_wait_s) for number in gang_numbers]
            tasks = {asyncio.create_task(trainer.run()): trainer for trainer in trainers}
            await self._faults()
            await self._wait_for_temporary_faults()
            stopping.set()
            _, late = await asyncio.wait(tasks, timeout=QUIET_S)
            for task in late:
                trainer = tasks[task]
                for verb, *names in trainer.waits_for.values():
                    self._history.note("unfinished", client=trainer.number, verb=verb, names=names, last=trainer.last)
                task.cancel()
            done = await asyncio.gather(*tasks, return_exceptions=True)
        for error in done:
            if isinstance(error, Exception):
                raise error

    # Faults.

    async def _faults(self) -> None:
        try:
            async with asyncio.timeout(self._seconds):
                for fault in islice(schedule(self._seed, self._service.possible()), self._max_faults):
                    if not fault.hasty:
                        await self._service.ready()
                    await asyncio.sleep(fault.after_s)
                    self._inject(fault)
                await self._service.ready()
                await asyncio.sleep(LOAD_AFTER_FAULTS_S)
        except TimeoutError:
            pass  # the time for faults is over

    def _inject(self, fault: Fault) -> None:
        agents = self._service.agents()
        note = self._history.note
        match fault.what:
            case "service.kill":
                in_start = not self._service.up.is_set()
                if self._service.kill(fault.lasts_s):
                    note("fault", what=fault.what, in_start=in_start)
            case "agent.kill" if agents:
                sandbox_id, pid = agents[int(fault.share * len(agents))]
                note("fault", what=fault.what, sandbox_id=sandbox_id, pid=pid)
                signal_agent(pid, signal.SIGKILL)
            case "agent.stop" if agents:
                sandbox_id, pid = agents[int(fault.share * len(agents))]
                note("fault", what=fault.what, sandbox_id=sandbox_id, pid=pid, seconds=fault.lasts_s)
                self._start_temporary_fault(self._pause_agent(pid, fault.lasts_s))
            case "cut":
                note("fault", what=fault.what, connections=self._proxy.cut(fault.share))
            case "link.cut":
                note("fault", what=fault.what, connections=self._service.cut_links(fault.share))
            case "disk.fill":
                self._start_temporary_fault(self._fill_disk(fault.lasts_s))
            case "state.delete":
                if self._service.delete_state():
                    note("fault", what=fault.what)
            case "clock.jump":
                note("fault", what=fault.what, offset_s=fault.jump_s)
                self._service.set_clock(fault.jump_s)

    def _start_temporary_fault(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._temporary_faults.add(task)
        task.add_done_callback(self._temporary_faults.discard)

    async def _pause_agent(self, pid: int, seconds: float) -> None:
        signal_agent(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            signal_agent(pid, signal.SIGCONT)
            self._history.note("fault", what="agent.go", pid=pid)

    async def _fill_disk(self, seconds: float) -> None:
        self._fills += 1
        self._history.note("fault", what="disk.full")
        try:
            await asyncio.to_thread(self._service.fill_disk)
            await asyncio.sleep(seconds)
        finally:
            self._fills -= 1
            if not self._fills:
                self._service.free_disk()
                self._history.note("fault", what="disk.free")

    async def _wait_for_temporary_faults(self) -> None:
        """Wait until no fault is in effect any more."""
        while self._temporary_faults:
            await asyncio.wait(set(self._temporary_faults))


def headers(tenant: Mapping[str, Any]) -> dict[str, str]:
    """Return the headers of every request of a tenant."""
    return {"Authorization": f"Bearer {tenant['token']}"}


def left_out(events: list[Event], impossible: Mapping[str, str]) -> list[str]:
    """Return what a run did not do and why, one sentence each.

    Args:
        events: the history of the run.
        impossible: the kinds of fault that could not be injected, each with its reason.
    """
    said = [f"{what} was not injected: {why}" for what, why in impossible.items()]
    modes = {lease["isolation"] for event in events if event.kind == "granted" for lease in event["leases"]} - {"bwrap"}
    if modes:
        said.append(f"marks of an earlier holder in /tmp were not looked for: slots were in the isolation mode {', '.join(sorted(modes))}")
    return said


def figures(events: list[Event], violations: list[Violation], *, starts: int, gang: int) -> dict[str, int]:
    """Return the counts that the report of a run shows.

    Args:
        events: the history of the run.
        violations: the broken promises.
        starts: how often the service was started.
        gang: how many slots a gang had.
    """
    kinds = Counter(event.kind for event in events)
    faults = Counter(event["what"] for event in events if event.kind == "fault")
    results = Counter(event["result"]["reason"] for event in events if event.kind == "result")
    calls = {event["call_id"] for event in events if event.kind == "result"}
    leases = {lease["lease_id"] for event in events if event.kind == "granted" for lease in event["leases"]}
    gangs = [event for event in events if event.kind == "granted" and event["count"] == gang]
    claims = claims_seen(events)
    return {
        "kills of the service": faults["service.kill"],
        "of them while it started": sum(1 for event in events if event.kind == "fault" and event["what"] == "service.kill" and event["in_start"]),
        "times it came back": max(0, starts - 1),
        "kills of agents": faults["agent.kill"],
        "agents stopped for a while": faults["agent.stop"],
        "connections cut": sum(event["connections"] for event in events if event.kind == "fault" and event["what"] == "cut"),
        "links to agents cut": sum(event["connections"] for event in events if event.kind == "fault" and event["what"] == "link.cut"),
        "disks filled": faults["disk.full"],
        "clock jumps": faults["clock.jump"],
        "state files deleted": faults["state.delete"],
        "acquires": kinds["granted"],
        "leases": len(leases),
        "calls checked": len(calls),
        "results checked": kinds["result"],
        "results sandbox_lost": results["sandbox_lost"],
        "results backend_error": results["backend_error"],
        "commands witnessed": sum(1 for event in events if event.kind == "witness" and event["word"] == "ran"),
        "renewals": kinds["renewed"],
        "releases": kinds["released"],
        "requests repeated": kinds["again"],
        "acquires refused": kinds["refused"],
        "gangs granted": len({event["key"] for event in gangs}),
        "longest wait of a gang, in leases granted to others": max((_granted_to_others(events, granted) for granted in gangs), default=0),
        "claims": len(claims),
        "longest claim, in leases of others that ended": max((claim.ended for claim in claims), default=0),
        "violations": sum(1 for violation in violations if violation.rule != "leak"),
        "leaks": sum(1 for violation in violations if violation.rule == "leak"),
    }


def _granted_to_others(events: list[Event], gang: Event) -> int:
    """Return how many leases clients that acquire no gangs were granted while a gang waited."""
    others = (event for event in events if event.kind == "granted" and event["count"] != gang["count"] and gang["began_at"] < event.at < gang.at)
    return len({lease["lease_id"] for event in others for lease in event["leases"]})
