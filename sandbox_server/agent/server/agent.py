"""The agent as a whole: it probes what the machine offers, starts the slots, serves the service's connections, and shuts down."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
from typing import Any, Awaitable, Callable, Mapping

from sandbox_server.agent import AGENT_VERSION, wire
from sandbox_server.agent.config import AgentConfig
from sandbox_server.agent.errors import Refused
from sandbox_server.agent.execution.in_flight_descriptors import InFlightGuard
from sandbox_server.agent.execution.slot_runtime import CacheFolder, SlotRuntime
from sandbox_server.agent.execution.tools.tool_registry import available_tools
from sandbox_server.agent.init import oom_score
from sandbox_server.agent.isolation.base import SLOT_PATH, Isolation, IsolationContext, interpreter
from sandbox_server.agent.isolation.probing.probe import ProbeResult, probe_isolation_modes
from sandbox_server.agent.kernel import seccomp
from sandbox_server.agent.kernel.cgroup_mounts import read_processor_quota
from sandbox_server.agent.kernel.cgroups import Cgroups
from sandbox_server.agent.kernel.priority import raise_priority
from sandbox_server.agent.kernel.processor_share import Processors
from sandbox_server.agent.kernel.trash import Trash
from sandbox_server.agent.kernel.uids import UidRange
from sandbox_server.agent.limits.guards import Guards
from sandbox_server.agent.network.requirements import find_missing_requirement
from sandbox_server.agent.network.slot_networks import SlotNetworks
from sandbox_server.agent.server import call_operations, recording_operations, slot_operations
from sandbox_server.agent.server.call_stream import CallStreamHandler
from sandbox_server.agent.server.connections import ServiceConnection, Stream, StreamHandler
from sandbox_server.agent.server.file_operations import FILE_OPERATIONS, open_file_operation
from sandbox_server.agent.server.listeners import Listeners
from sandbox_server.agent.server.port_operation import open_port
from sandbox_server.agent.server.terminal_stream import TerminalStream
from sandbox_server.agent.slots.bundle import provide_slot_lib
from sandbox_server.agent.slots.caches import Caches
from sandbox_server.agent.slots.runtimes import RuntimePool
from sandbox_server.agent.slots.slots import AgentSlot
from sandbox_server.agent.slots.stateful_probe import probe_stateful_tools
from sandbox_server.agent.slots.transitions import SlotTransitions

log = logging.getLogger(__name__)

_EMPTY_TRASH_WITHIN_S = 5.0
_TRANSITIONS: Mapping[str, Callable[[Stream, SlotTransitions, Mapping[str, Any]], Awaitable[None]]] = {
    "reset": slot_operations.reset_slot,
    "equip": slot_operations.equip_slot,
    "narrow": slot_operations.narrow_slot,
    "verify": slot_operations.verify_slot,
}
_CALL_OPERATIONS: Mapping[str, Callable[[Stream, AgentSlot, Mapping[str, Any]], Awaitable[None]]] = {
    "cancel": lambda stream, slot, meta: call_operations.cancel_call(stream, slot, meta.get("call_id")),
    "call_status": lambda stream, slot, meta: call_operations.send_call_status(stream, slot, meta.get("call_id"), _fetches_outputs(meta)),
    "attach": lambda stream, slot, meta: call_operations.follow_call(stream, slot, meta.get("call_id"), meta.get("offset"), _fetches_outputs(meta)),
    "output": lambda stream, slot, meta: call_operations.send_output(stream, slot, meta.get("call_id"), meta.get("offset")),
    "result_output": lambda stream, slot, meta: call_operations.send_result_output(stream, slot, meta.get("call_id")),
    "recording": lambda stream, slot, meta: recording_operations.send_recording(stream, slot, meta.get("name")),
    "quiet": lambda stream, slot, meta: call_operations.wait_until_quiet(stream, slot, slot.epoch),
}
_SLOT_OPERATIONS: Mapping[str, Callable[[Stream, AgentSlot, Mapping[str, Any]], StreamHandler]] = {
    **dict.fromkeys(FILE_OPERATIONS, open_file_operation),
    "port": open_port,
    "terminal": TerminalStream,
}
"""Operation -> what handles its stream, in a slot that the service holds."""
_CANCELLED_ON_ABORT = frozenset({"attach", "output", "quiet", "recording", "result_output"})  # these only read; all others continue without their stream


def _fetches_outputs(meta: Mapping[str, Any]) -> bool:
    return meta.get("fetches_outputs") is True


class Agent:
    """The agent of one sandbox.

    Args:
        config: its configuration.
        on_listening: called when the service can connect.
    """

    def __init__(self, config: AgentConfig, on_listening: Callable[[], None] = lambda: None) -> None:
        self.config = config
        self._on_listening = on_listening
        self.token = config.token
        self.boot = secrets.token_hex(16)
        self.slots: dict[str, AgentSlot] = {}
        self._transitions: dict[str, SlotTransitions] = {}
        self._watch_streams: list[slot_operations.WatchStream] = []
        self.stopping = asyncio.Event()  # set it to shut the agent down
        self._loop = asyncio.get_event_loop()
        self._connections: set[ServiceConnection] = set()
        self._tools: tuple[str, ...] = ()
        self._tool_problems: Mapping[str, str] = {}  # why tools that were tried do not work
        self._probed: ProbeResult | None = None
        self._alone_timer: asyncio.TimerHandle | None = None
        self._listeners = Listeners(self, config.listen, config.base_dir)
        self._runtimes: RuntimePool | None = None
        self._cgroups: Cgroups | None = None
        self._networks: SlotNetworks | None = None
        self._guards: Guards | None = None
        self._trash = Trash(os.path.join(config.base_dir, "trash"), self._log_not_deleted)

    @staticmethod
    def _log_not_deleted(path: str, error: OSError) -> None:
        log.error("a folder could not be deleted: %s: %s", path, error)

    async def run_agent(self) -> None:
        """Serve until `stopping` is set, then end all slots.

        Raises:
            OSError: the agent cannot listen, or cannot use its folder.
        """
        self._discard_old_folders()
        processors = Processors(tuple(sorted(os.sched_getaffinity(0))), read_processor_quota(), int(self.config.first_processor))
        self._cgroups = Cgroups(self.boot, self.config, processors.limit_of_slot(self.config.limits.cpu))
        sets_floor = oom_score.protect_this_process()
        raise_priority()
        self._guards = Guards(self.config, self._cgroups, self._trash, sets_floor)
        uids = UidRange()
        self._tools = available_tools(self.config.env_vars.get("PATH", SLOT_PATH))
        if self.config.internet:
            owners = uids if os.geteuid() == 0 else None
            self._networks = SlotNetworks(self.config, interpreter(), owners, lambda reason: self._stop("the network of its slots has ended: %s" % reason))
        self._probed = await probe_isolation_modes(self._make_context(processors, sets_floor), self._cgroups, self._trash, uids)
        runtimes = self._runtimes = self._make_runtimes(self._probed, processors, uids)
        if runtimes is not None and self.config.require_stateful_sandbox:
            await self._probe_tools(self._probed, runtimes)
        await self._listeners.start_listening()
        self._on_listening()
        self._start_lifetime_timers()
        if runtimes is not None:
            runtimes.on_in_flight_full = InFlightGuard(self._running_runtimes).start_search
            await self._start_slots(runtimes)
            gc.freeze()  # what has been imported stays: the garbage collector need not search it again and again
            self._guards.start_guards(self._held_runtimes, runtimes.prepared_runtimes, self._report_effective_limits)
        await self.stopping.wait()
        await self._shut_down()

    def _discard_old_folders(self) -> None:
        """Delete what an earlier agent has left in the same folder."""
        for name in ("slots", "spool", "lib", "etc", "caches"):
            self._trash.discard_folder(os.path.join(self.config.base_dir, name))
        os.makedirs(os.path.join(self.config.base_dir, "slots"), mode=0o700)

    def _make_context(self, processors: Processors, sets_floor: bool) -> IsolationContext:
        lib_dir = provide_slot_lib(os.path.join(self.config.base_dir, "lib"))
        machine = os.uname().machine
        return IsolationContext(
            self.config,
            os.path.join(self.config.base_dir, "slots"),
            lib_dir,
            seccomp.build_filter(machine),
            seccomp.build_filter(machine, allow_message_queues=os.path.ismount("/dev/mqueue")),
            processors,
            sets_floor,
            self._networks,
        )

    def _make_runtimes(self, probed: ProbeResult, processors: Processors, uids: UidRange) -> RuntimePool | None:
        if probed.isolation is None:
            return None
        return RuntimePool(self.config, probed.isolation, self._trash, self._make_caches(uids), processors, self._networks)

    async def _probe_tools(self, probed: ProbeResult, runtimes: RuntimePool) -> None:
        """Try the tools that need more than a shell in the first slot runtime, which no slot can use afterwards."""
        if probed.first_runtime is not None:
            runtime, probed.first_runtime = probed.first_runtime, None
            self._tool_problems = await probe_stateful_tools(runtime, runtimes)
            failed = {*self._tool_problems, *(("terminal_stateful",) if "bash_stateful" in self._tool_problems else ())}
            self._tools = tuple(tool for tool in self._tools if tool not in failed)

    def _make_caches(self, uids: UidRange) -> Caches:
        folder = os.path.join(self.config.base_dir, "caches")
        groups = uids if os.geteuid() == 0 else None
        return Caches(folder, int(self.config.cache_bytes), self.config.cache_measure_every_s, self._trash, groups)

    def _start_lifetime_timers(self) -> None:
        self._start_alone_timer()
        if self.config.max_life_s is not None:
            self._loop.call_later(self.config.max_life_s, self._stop, "it has reached its maximum lifetime")

    def _start_alone_timer(self) -> None:
        if self.config.alone_exit_s is not None and not self._connections:
            reason = "no service has been connected for %g s" % self.config.alone_exit_s
            self._alone_timer = self._loop.call_later(self.config.alone_exit_s, self._stop, reason)

    def _stop(self, reason: str) -> None:
        log.info("the agent ends: %s", reason)
        self.stopping.set()

    async def _start_slots(self, runtimes: RuntimePool) -> None:
        for number in range(self.config.slots):
            slot = AgentSlot(str(number), runtimes, self._report_slot)
            self.slots[slot.slot_id] = slot
            self._transitions[slot.slot_id] = SlotTransitions(slot, runtimes)
            self._report_slot(slot)
        remaining = list(self.slots.values())
        first = self._probed.first_runtime if self._probed is not None else None
        if first is not None:
            remaining.pop(0).adopt_runtime(first)
        await asyncio.gather(*(slot.start_slot() for slot in remaining))
        runtimes.prepare_runtimes()

    def _held_runtimes(self) -> list[SlotRuntime]:
        return [slot.runtime for slot in self.slots.values() if slot.runtime is not None]

    def _running_runtimes(self) -> dict[str, SlotRuntime]:
        return {runtime.slot_id: runtime for runtime in self._held_runtimes() if not runtime.link.closed}

    async def _shut_down(self) -> None:
        self._listeners.stop_listening()
        for watch_stream in self._watch_streams:  # before the calls that run are ended, so that whoever gets their results sends no further ones here
            watch_stream.report_end_of_agent()
        if self._guards is not None:
            await self._guards.stop_guards()
        await asyncio.gather(*(slot.end_slot() for slot in self.slots.values()))
        if self._runtimes is not None:
            await self._runtimes.close_pool()
            await self._runtimes.caches.close_caches()
            self._runtimes.isolation.remove_mode_files()
        if self._networks is not None:
            self._networks.close_networks()
        if self._cgroups is not None:
            self._cgroups.remove_agent_groups()
        for connection in list(self._connections):
            connection.close_connection()
        self._trash.end_thread()
        await self._loop.run_in_executor(None, self._trash.wait_for_thread, _EMPTY_TRASH_WITHIN_S)

    # What the service watches.

    def _report_slot(self, slot: AgentSlot) -> None:
        for watch_stream in self._watch_streams:
            watch_stream.report_slot(slot)

    def _report_effective_limits(self) -> None:
        effective = self._guards.effective_limits() if self._guards is not None else {}
        for watch_stream in self._watch_streams:
            watch_stream.report_effective_limits(effective)

    # What a connection needs.

    def make_hello(self) -> dict[str, Any]:
        """See `connections.Server`."""
        probed, cgroups, guards = self._probed, self._cgroups, self._guards
        if probed is None or cgroups is None or guards is None:
            raise RuntimeError("the agent listens only after it has probed the isolation modes")
        isolation = probed.isolation
        hello: dict[str, Any] = {
            "v": wire.PROTOCOL_VERSION,
            "boot": self.boot,
            "sandbox_id": self.config.sandbox_id,
            "agent_version": AGENT_VERSION,
            "isolation": isolation.name if isolation is not None else None,
            "effective": guards.effective_limits(),
            "capabilities": {
                "modes": probed.modes,
                "network": list(isolation.networks) if isolation is not None else [],
                "limits": {"memory": guards.memory_limit_enforcer(), "processes": cgroups.pids, "cpu": cgroups.cpu, "disk": "accounting"},
                "not_enforced": guards.limits_not_enforced(),
                "kill": cgroups.kill,
                "proves": ["oom", "resource_limit"],
                "tools": list(self._tools),
                "tool_problems": dict(self._tool_problems),
                "places": isolation.tmp_isolation if isolation is not None else "none",
                "slot_start": isolation.slot_start if isolation is not None else "none",
                "cache": isolation is not None and isolation.caches,
                "read_only": isolation is not None and isolation.read_only_entries,
                "internet": self._describe_internet(isolation),
            },
        }
        if isolation is None:
            problems = {name: problem for name, problem in probed.modes.items() if self.config.isolation in ("auto", name)}
            hello["error"] = "no isolation mode can be used: %s" % "; ".join("%s: %s" % mode for mode in problems.items())
        return hello

    def _describe_internet(self, isolation: Isolation | None) -> str:
        """Return `ok` if slots have networks of their own, or could have them as far as is known without trying; otherwise what is missing."""
        if self.config.internet and isolation is not None:
            return "ok"
        if isolation is None or isolation.name != "bwrap":
            return "it needs the mode bwrap"
        return find_missing_requirement(os.geteuid() == 0, isolation.slot_start) or "ok"

    def add_connection(self, connection: ServiceConnection) -> None:
        """See `connections.Server`."""
        self._connections.add(connection)
        if self._alone_timer is not None:
            self._alone_timer.cancel()
            self._alone_timer = None

    def remove_connection(self, connection: ServiceConnection) -> None:
        """See `connections.Server`."""
        self._connections.discard(connection)
        self._start_alone_timer()

    def open_stream(self, stream: Stream, meta: dict[str, Any]) -> StreamHandler:
        """See `connections.Server`."""
        op = meta.get("op")
        if op == "calls":
            return CallStreamHandler(stream, self._find_slot(meta), meta.get("epoch"), _fetches_outputs(meta))
        if op == "watch":
            watch_stream = slot_operations.WatchStream(stream, self.slots, self._watch_streams.remove)
            self._watch_streams.append(watch_stream)
            return watch_stream
        open_operation = _SLOT_OPERATIONS.get(str(op))
        if open_operation is not None:
            slot = self._find_slot(meta)
            slot.check_admits(meta.get("epoch"))
            return open_operation(stream, slot, meta)
        return slot_operations.CoroutineStream(stream, self._find_operation(op, stream, meta), cancel_on_abort=op in _CANCELLED_ON_ABORT)

    def _find_operation(self, op: Any, stream: Stream, meta: Mapping[str, Any]) -> Callable[[], Awaitable[None]]:
        """Return what makes the coroutine of an operation.

        Raises:
            Refused: there is no such operation or slot, or the epoch is not the slot's.
        """
        if op == "stats":
            return lambda: self._send_stats(stream)
        if op == "shutdown":
            return lambda: self._accept_shutdown(stream)
        if op == "cache_drop":
            return lambda: self._drop_cache(stream, meta.get("cache"))
        slot = self._find_slot(meta)
        if op in _TRANSITIONS:
            transition, transitions = _TRANSITIONS[op], self._transitions[slot.slot_id]
            return lambda: transition(stream, transitions, meta)
        if op not in _CALL_OPERATIONS:
            raise Refused("not_implemented", "there is no operation %s" % ascii(op))
        slot.check_epoch(meta.get("epoch"))
        operation = _CALL_OPERATIONS[op]
        return lambda: operation(stream, slot, meta)

    def _find_slot(self, meta: Mapping[str, Any]) -> AgentSlot:
        slot_id = meta.get("slot")
        slot = self.slots.get(slot_id) if isinstance(slot_id, str) else None
        if slot is None:
            raise Refused("unknown_slot", "there is no slot %s" % ascii(slot_id))
        return slot

    # Operations on the whole sandbox.

    async def _send_stats(self, stream: Stream) -> None:
        states: dict[str, int] = {}
        for slot in self.slots.values():
            states[slot.state] = states.get(slot.state, 0) + 1
        caches = self._runtimes.caches.describe_caches() if self._runtimes is not None else []
        stream.end_stream({"slots": len(self.slots), "states": states, "connections": len(self._connections), "caches": caches})

    async def _drop_cache(self, stream: Stream, cache_key: Any) -> None:
        if self._runtimes is not None:
            self._runtimes.caches.drop_cache(cache_key, self._find_cache_holders)
        stream.end_stream()

    def _find_cache_holders(self, cache: CacheFolder) -> list[str]:
        return [slot.slot_id for slot in self.slots.values() if slot.lease.cache is cache]

    async def _accept_shutdown(self, stream: Stream) -> None:
        stream.end_stream()
        self._loop.call_soon(self._stop, "the service has asked it to")
