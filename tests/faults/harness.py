"""One run: load and faults at once, a quiet time in which every client comes to its end, a stop, a look at what is left, and the verdict."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

from tests.faults.checker import Violation, check
from tests.faults.claims import claims_seen
from tests.faults.history import Event, History
from tests.faults.leaks import leaks
from tests.faults.proxy import Proxy
from tests.faults.schedule import Fault, schedule
from tests.faults.stage import Stage, free_port, signal_agent
from tests.faults.trainer import READ_TIMEOUT_S, Tenant, Trainer
from tests.faults.watch import follow_events
from tests.faults.witness import witness

POOLS: Final[Mapping[str, Any]] = {
    "default": {
        "backend": "local",
        "slots_per_sandbox": 5,
        "min_sandboxes": 2,
        "max_sandboxes": 5,
        "idle_timeout_s": 10,
        "on_shutdown": "destroy",
    }
}
TENANTS: Final[Sequence[Mapping[str, Any]]] = (
    {"name": "turning", "token": "the-token-of-those-who-keep-their-share-turning", "admin": True},
    {"name": "gangs", "token": "the-token-of-the-gangs"},
)
"""One tenant that keeps its share turning, and one whose gangs would starve beside it."""
GANG = 16
"""How many slots a gang has, of the 25 that the pool can have."""
GANGS = 2
"""How many clients acquire gangs, beside the others."""
CLAIM_AFTER_S = 2.0
QUIET_S = 60.0
"""How long after the last fault every request may take to be answered, in seconds."""
UP_WITHIN_S = 60.0


@dataclass(kw_only=True)
class Report:
    """What a run came to. `left_out`: the kinds of fault, and the checks, that this machine does not allow, each with its reason."""

    seed: int
    seconds: float
    history: History
    violations: list[Violation]
    figures: dict[str, int] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    log: str = ""


class FaultRun:
    """One run.

    Args:
        seed: decides what the clients do and what fails.
        seconds: how long.
        clients: how many.
    """

    def __init__(self, seed: int, seconds: float, clients: int) -> None:
        self._seed = seed
        self._seconds = seconds
        self._clients = clients
        self._history = History()
        settings = {"pools": POOLS, "tenants": list(TENANTS), "claim_after_s": CLAIM_AFTER_S}
        self._stage = Stage(self._history, settings, free_port(seed * 101 % 10_000))
        self._proxy = Proxy(self._stage.port)
        self._behind: set[asyncio.Task[None]] = set()
        self._fills = 0

    async def run(self) -> Report:
        """Do it all, and take away what belongs to the harness."""
        stage = self._stage
        try:
            async with AsyncExitStack() as stack:
                witness_port = await stack.enter_async_context(witness(self._history))
                await stack.enter_async_context(self._proxy.running())
                keeping = asyncio.create_task(stage.keep_running())
                watching = asyncio.create_task(follow_events(f"http://127.0.0.1:{stage.port}", headers(TENANTS[0]), self._history))
                try:
                    async with asyncio.timeout(UP_WITHIN_S):
                        await stage.up.wait()
                    await self._load(witness_port)
                finally:
                    await self._calm()
                    stage.look()
                    watching.cancel()
                    await stage.stop(keeping)
                    await asyncio.wait([watching])
            for leak in await leaks(stage.state_dir, stage.seen):
                self._history.note("leak", what=leak)
            log = stage.log_path.read_text(encoding="utf-8", errors="replace")
        finally:
            stage.close()
        report = Report(seed=self._seed, seconds=self._seconds, history=self._history, violations=check(self._history.events), log=log)
        report.figures = figures(self._history.events, report.violations, starts=stage.starts)
        report.left_out = left_out(self._history.events, stage.impossible())
        return report

    async def _load(self, witness_port: int) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        stopping = asyncio.Event()
        async with httpx.AsyncClient(base_url=self._proxy.url, timeout=READ_TIMEOUT_S, limits=limits, trust_env=False) as http:
            turning, gangs = (Tenant(http, headers(tenant)) for tenant in TENANTS)
            trainers = [Trainer(number, self._seed, turning, self._history, stopping, witness_port) for number in range(self._clients)]
            gang_numbers = range(self._clients, self._clients + GANGS)
            trainers += [Trainer(number, self._seed, gangs, self._history, stopping, witness_port, gang=GANG) for number in gang_numbers]
            tasks = {asyncio.create_task(trainer.run()): trainer for trainer in trainers}
            await self._faults()
            await self._calm()
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
                for fault in schedule(self._seed, self._stage.possible()):
                    if not fault.hasty:
                        await self._stage.ready()
                    await asyncio.sleep(fault.after_s)
                    self._do(fault)
        except TimeoutError:
            pass  # the time of the faults is over

    def _do(self, fault: Fault) -> None:
        agents = self._stage.agents()
        note = self._history.note
        match fault.what:
            case "service.kill":
                in_start = not self._stage.up.is_set()
                if self._stage.kill(fault.lasts_s):
                    note("fault", what=fault.what, in_start=in_start)
            case "agent.kill" if agents:
                sandbox_id, pid = agents[int(fault.share * len(agents))]
                note("fault", what=fault.what, sandbox_id=sandbox_id, pid=pid)
                signal_agent(pid, signal.SIGKILL)
            case "agent.stop" if agents:
                sandbox_id, pid = agents[int(fault.share * len(agents))]
                note("fault", what=fault.what, sandbox_id=sandbox_id, pid=pid, seconds=fault.lasts_s)
                self._later(self._hold(pid, fault.lasts_s))
            case "cut":
                note("fault", what=fault.what, connections=self._proxy.cut(fault.share))
            case "link.cut":
                note("fault", what=fault.what, connections=self._stage.cut_links(fault.share))
            case "disk.fill":
                self._later(self._fill(fault.lasts_s))
            case "state.delete":
                if self._stage.delete_state():
                    note("fault", what=fault.what)
            case "clock.jump":
                note("fault", what=fault.what, offset_s=fault.jump_s)
                self._stage.set_clock(fault.jump_s)

    def _later(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._behind.add(task)
        task.add_done_callback(self._behind.discard)

    async def _hold(self, pid: int, seconds: float) -> None:
        signal_agent(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            signal_agent(pid, signal.SIGCONT)
            self._history.note("fault", what="agent.go", pid=pid)

    async def _fill(self, seconds: float) -> None:
        self._fills += 1
        self._history.note("fault", what="disk.full")
        try:
            await asyncio.to_thread(self._stage.fill_disk)
            await asyncio.sleep(seconds)
        finally:
            self._fills -= 1
            if not self._fills:
                self._stage.free_disk()
                self._history.note("fault", what="disk.free")

    async def _calm(self) -> None:
        """Wait until nothing fails any more."""
        while self._behind:
            await asyncio.wait(set(self._behind))


def headers(tenant: Mapping[str, Any]) -> dict[str, str]:
    """What every request of a tenant carries."""
    return {"Authorization": f"Bearer {tenant['token']}"}


def left_out(events: list[Event], impossible: Mapping[str, str]) -> list[str]:
    """What a run did not do, and why, one sentence each.

    Args:
        events: its history.
        impossible: the kinds of fault that could not be injected, and why.
    """
    said = [f"{what} was not injected: {why}" for what, why in impossible.items()]
    modes = {lease["isolation"] for event in events if event.kind == "granted" for lease in event["leases"]} - {"bwrap"}
    if modes:
        said.append(f"marks of an earlier holder in /tmp were not looked for: slots were in the isolation mode {', '.join(sorted(modes))}")
    return said


def figures(events: list[Event], violations: list[Violation], *, starts: int) -> dict[str, int]:
    """What a run is told by."""
    kinds = Counter(event.kind for event in events)
    faults = Counter(event["what"] for event in events if event.kind == "fault")
    results = Counter(event["result"]["reason"] for event in events if event.kind == "result")
    calls = {event["call_id"] for event in events if event.kind == "result"}
    leases = {lease["lease_id"] for event in events if event.kind == "granted" for lease in event["leases"]}
    gangs = [event for event in events if event.kind == "granted" and event["count"] == GANG]
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
        "longest wait of a gang, in leases granted to others": max((_overtaken(events, gang) for gang in gangs), default=0),
        "claims": len(claims),
        "longest claim, in leases of others that ended": max((claim.ended for claim in claims), default=0),
        "violations": sum(1 for violation in violations if violation.rule != "leak"),
        "leaks": sum(1 for violation in violations if violation.rule == "leak"),
    }


def _overtaken(events: list[Event], gang: Event) -> int:
    """How many leases others were granted while a gang waited, as far as the clients know."""
    others = (event for event in events if event.kind == "granted" and event["count"] != GANG and gang["began_at"] < event.at < gang.at)
    return len({lease["lease_id"] for event in others for lease in event["leases"]})
