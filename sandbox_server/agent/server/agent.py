"""The agent itself: probes what it may use, starts the slots, answers the service, ends."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from typing import Any, Awaitable, Callable, Mapping

from sandbox_server.agent import AGENT_VERSION, wire
from sandbox_server.agent.config import AgentConfig
from sandbox_server.agent.errors import Refused
from sandbox_server.agent.execution.init_client.in_flight_descriptors import InFlightBlame
from sandbox_server.agent.execution.slot_runtime import CacheFolder, SlotRuntime
from sandbox_server.agent.execution.tools.tool_registry import TOOLS
from sandbox_server.agent.init import oom_score
from sandbox_server.agent.init.priority import raise_priority
from sandbox_server.agent.isolation.base import IsolationContext
from sandbox_server.agent.isolation.probe import ProbeResult, probe_isolation_modes
from sandbox_server.agent.kernel import seccomp
from sandbox_server.agent.kernel.cgroups import Cgroups
from sandbox_server.agent.kernel.trash import Trash
from sandbox_server.agent.kernel.uids import UidRange
from sandbox_server.agent.limits.guards import Guards
from sandbox_server.agent.server import operations
from sandbox_server.agent.server.connections import Connection, Handler, Stream
from sandbox_server.agent.server.file_operations import FILE_OPS, open_file_op
from sandbox_server.agent.server.listeners import Listeners
from sandbox_server.agent.slots.bundle import write_slot_lib
from sandbox_server.agent.slots.caches import Caches
from sandbox_server.agent.slots.runtimes import RuntimePool
from sandbox_server.agent.slots.slots import Slot
from sandbox_server.agent.slots.transitions import SlotTransitions

log = logging.getLogger(__name__)

_TRASH_WITHIN_S = 5.0
_CHANGES: Mapping[str, Callable[[Stream, SlotTransitions, Mapping[str, Any]], Awaitable[None]]] = {
    "reset": operations.reset,
    "equip": operations.equip,
    "narrow": operations.narrow,
    "verify": operations.verify,
}


class Agent:
    """One sandbox."""

    def __init__(self, config: AgentConfig) -> None:
        self.config = config
        self.token = config.token
        self.boot = secrets.token_hex(16)
        self.slots: dict[str, Slot] = {}
        self._changes: dict[str, SlotTransitions] = {}
        self.watchers: list[operations.Watch] = []
        self.over = asyncio.Event()
        self._loop = asyncio.get_event_loop()
        self._connections: set[Connection] = set()
        self._probed: ProbeResult | None = None
        self._waiting: list[Callable[[], None]] = []
        self._alone: asyncio.TimerHandle | None = None
        self._listeners = Listeners(self, config.listen, config.base_dir)
        self._bodies: RuntimePool | None = None
        self._cgroups: Cgroups | None = None
        self._guards: Guards | None = None
        self._trash = Trash(os.path.join(config.base_dir, "trash"), self._not_deleted)

    @staticmethod
    def _not_deleted(path: str, error: OSError) -> None:
        log.error("a folder could not be deleted: %s: %s", path, error)

    async def run(self) -> None:
        """Listen, probe, start the slots, serve until told to end, end everything."""
        self._clean_leftovers()
        self._cgroups = Cgroups(self.boot, self.config)
        sets_floor = oom_score.protect_this_process()
        raise_priority()
        self._guards = Guards(self.config, self._cgroups, self._trash, sets_floor)
        lib = os.path.join(self.config.base_dir, "lib")
        write_slot_lib(lib)
        machine = os.uname().machine
        context = IsolationContext(
            self.config,
            os.path.join(self.config.base_dir, "slots"),
            lib,
            seccomp.build_filter(machine),
            seccomp.build_filter(machine, allow_message_queues=os.path.ismount("/dev/mqueue")),
            tuple(sorted(os.sched_getaffinity(0))),
            sets_floor,
        )
        uids = UidRange()
        self._probed = await probe_isolation_modes(context, self._cgroups, self._trash, uids)
        await self._listeners.start()
        self._watch_life()
        if self._probed.isolation is not None:
            caches = Caches(os.path.join(self.config.base_dir, "caches"), int(self.config.cache_bytes), self._trash, uids if os.geteuid() == 0 else None)
            self._bodies = RuntimePool(self.config, self._probed.isolation, self._trash, caches)
            self._bodies.on_in_flight_full = InFlightBlame(self._running_bodies).look
            await self._start_slots(self._bodies)
            self._guards.start(self._held_runtimes, self._bodies.prepared, self._effective_changed)
        await self.over.wait()
        await self._end()

    def _clean_leftovers(self) -> None:
        for name in ("slots", "spool", "lib", "etc", "caches"):
            self._trash.throw(os.path.join(self.config.base_dir, name))
        os.makedirs(os.path.join(self.config.base_dir, "slots"), mode=0o700)

    def _watch_life(self) -> None:
        self._now_alone()
        if self.config.max_life_s is not None:
            self._loop.call_later(self.config.max_life_s, self._stop, "it has lived its longest life")

    def _now_alone(self) -> None:
        if self.config.alone_exit_s is not None and not self._connections:
            self._alone = self._loop.call_later(self.config.alone_exit_s, self._stop, "no service has been connected for %g s" % self.config.alone_exit_s)

    def _stop(self, why: str) -> None:
        log.info("the agent ends: %s", why)
        self.over.set()

    async def _start_slots(self, bodies: RuntimePool) -> None:
        probed = self._probed
        for number in range(self.config.slots):
            slot = Slot(str(number), bodies, self._changed)
            self.slots[slot.slot_id] = slot
            self._changes[slot.slot_id] = SlotTransitions(slot, bodies)
            self._changed(slot)
        first = probed.first_runtime if probed is not None else None
        rest = list(self.slots.values())
        if first is not None:
            rest.pop(0).adopt(first)
        await asyncio.gather(*(slot.start() for slot in rest))
        bodies.refill()

    def _held_runtimes(self) -> list[SlotRuntime]:
        return [slot.body for slot in self.slots.values() if slot.body is not None]

    def _running_bodies(self) -> dict[str, SlotRuntime]:
        return {slot.slot_id: slot.body for slot in self.slots.values() if slot.body is not None and not slot.body.link.closed}

    def _changed(self, slot: Slot) -> None:
        for watcher in self.watchers:
            watcher.changed(slot)

    async def _end(self) -> None:
        self._listeners.close()
        if self._guards is not None:
            await self._guards.close()
        await asyncio.gather(*(slot.end() for slot in self.slots.values()))
        if self._bodies is not None:
            await self._bodies.close()
            await self._bodies.caches.close_caches()
            self._bodies.isolation.close()
        if self._cgroups is not None:
            self._cgroups.close()
        for connection in list(self._connections):
            connection.close()
        self._trash.close()
        await self._loop.run_in_executor(None, self._trash.join, _TRASH_WITHIN_S)

    # What connections need.

    def hello(self) -> dict[str, Any]:
        """See `serve.Server`."""
        probed, cgroups, guards = self._probed, self._cgroups, self._guards
        if probed is None or cgroups is None or guards is None:
            raise RuntimeError("nobody is let in before the probing is done")
        isolation = probed.isolation
        answer: dict[str, Any] = {
            "v": wire.PROTOCOL_VERSION,
            "boot": self.boot,
            "sandbox_id": self.config.sandbox_id,
            "agent_version": AGENT_VERSION,
            "isolation": isolation.name if isolation is not None else None,
            "effective": guards.effective(),
            "capabilities": {
                "modes": probed.modes,
                "network": list(isolation.networks) if isolation is not None else [],
                "limits": {"memory": guards.memory_by(), "processes": cgroups.pids, "cpu": cgroups.cpu, "disk": "accounting"},
                "not_enforced": guards.not_enforced(),
                "kill": cgroups.kill,
                "proves": ["oom", "resource_limit"],
                "tools": list(TOOLS),
                "places": isolation.places if isolation is not None else "none",
                "cache": isolation is not None and isolation.caches,
            },
        }
        if isolation is None:
            wanted = {name: said for name, said in probed.modes.items() if self.config.isolation in ("auto", name)}
            answer["error"] = "no isolation mode can be used: %s" % "; ".join("%s: %s" % mode for mode in wanted.items())
        return answer

    def effective(self) -> dict[str, Any]:
        """The limits that hold for each slot now."""
        return self._guards.effective() if self._guards is not None else {}

    def _effective_changed(self) -> None:
        for watcher in self.watchers:
            watcher.effective_changed()

    def connected(self, connection: Connection) -> None:
        """See `serve.Server`."""
        self._connections.add(connection)
        if self._alone is not None:
            self._alone.cancel()
            self._alone = None

    def disconnected(self, connection: Connection) -> None:
        """See `serve.Server`."""
        self._connections.discard(connection)
        self._now_alone()

    def open(self, stream: Stream, meta: dict[str, Any]) -> Handler:
        """See `serve.Server`."""
        op = meta.get("op")
        if op == "calls":
            return operations.Calls(stream, self._slot(meta), meta.get("epoch"), meta.get("fetches_outputs") is True)
        if op == "watch":
            return operations.Watch(self, stream)
        if op in FILE_OPS:
            slot = self._slot(meta)
            slot.admit(meta.get("epoch"))
            return open_file_op(stream, slot, meta)
        work = self._work(op, stream, meta)
        return operations.Task(stream, work, cancel_on_abort=op in ("attach", "output", "quiet", "result_output"))

    def _work(self, op: Any, stream: Stream, meta: Mapping[str, Any]) -> Callable[[], Awaitable[None]]:
        if op == "stats":
            return lambda: self._stats(stream)
        if op == "shutdown":
            return lambda: self._shutdown(stream)
        if op == "cache_drop":
            return lambda: self._cache_drop(stream, meta.get("cache"))
        slot = self._slot(meta)
        if op in _CHANGES:
            changes = self._changes[slot.slot_id]
            return lambda: _CHANGES[str(op)](stream, changes, meta)
        if op not in ("cancel", "call_status", "attach", "output", "quiet", "result_output"):
            raise Refused("not_implemented", "there is no operation %s" % ascii(op))
        slot.check_epoch(meta.get("epoch"))
        if op == "quiet":
            return lambda: operations.quiet(stream, slot, slot.epoch)
        call_id, fetches = meta.get("call_id"), meta.get("fetches_outputs") is True
        if op == "cancel":
            return lambda: operations.cancel(stream, slot, call_id)
        if op == "call_status":
            return lambda: operations.call_status(stream, slot, call_id, fetches)
        if op == "attach":
            return lambda: operations.attach(stream, slot, call_id, meta.get("offset"), fetches)
        if op == "result_output":
            return lambda: operations.result_output(stream, slot, call_id)
        return lambda: operations.output(stream, slot, call_id, meta.get("offset"))

    def _slot(self, meta: Mapping[str, Any]) -> Slot:
        slot_id = meta.get("slot")
        slot = self.slots.get(slot_id) if isinstance(slot_id, str) else None
        if slot is None:
            raise Refused("unknown_slot", "there is no slot %s" % ascii(slot_id))
        return slot

    async def _stats(self, stream: Stream) -> None:
        states: dict[str, int] = {}
        for slot in self.slots.values():
            states[slot.state] = states.get(slot.state, 0) + 1
        caches = self._bodies.caches.stats() if self._bodies is not None else []
        stream.end({"slots": len(self.slots), "states": states, "connections": len(self._connections), "caches": caches})

    async def _cache_drop(self, stream: Stream, key: Any) -> None:
        if self._bodies is not None:
            self._bodies.caches.drop_cache(key, self._holders)
        stream.end()

    def _holders(self, cache: CacheFolder) -> list[str]:
        return [slot.slot_id for slot in self.slots.values() if slot.cache is cache]

    async def _shutdown(self, stream: Stream) -> None:
        stream.end()
        self._loop.call_soon(self._stop, "the service said so")
