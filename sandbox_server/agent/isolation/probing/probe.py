"""Finds out which isolation modes work on this machine by starting a slot in each of them, unless another agent has recorded that it works."""

from __future__ import annotations

import dataclasses
from typing import Callable

from sandbox_server.agent.config import ISOLATION_MODES
from sandbox_server.agent.errors import StartFailed
from sandbox_server.agent.execution.slot_runtime import SlotRuntime
from sandbox_server.agent.isolation.base import Isolation, IsolationContext
from sandbox_server.agent.isolation.bwrap import BwrapIsolation
from sandbox_server.agent.isolation.none import NoIsolation
from sandbox_server.agent.isolation.probing.facts import collect_facts
from sandbox_server.agent.isolation.probing.records import ModeRecord, find_records
from sandbox_server.agent.isolation.uid import UidIsolation
from sandbox_server.agent.kernel.cgroups import Cgroups
from sandbox_server.agent.kernel.trash import Trash
from sandbox_server.agent.kernel.uids import UidRange


@dataclasses.dataclass
class ProbeResult:
    """The result of the probe.

    Args:
        isolation: the mode that is used; None if no permitted mode works.
        modes: `ok` or the error of each mode.
        first_runtime: the slot runtime that the probe has started in the mode that is used.
    """

    isolation: Isolation | None
    modes: dict[str, str]
    first_runtime: SlotRuntime | None


async def probe_isolation_modes(context: IsolationContext, cgroups: Cgroups, trash: Trash, uids: UidRange) -> ProbeResult:
    """Find out which modes work, the strongest first. The first one that works and is permitted by the configuration is used.

    A slot is started in the mode that is used, and becomes the first slot. In another mode a slot is only started, and ended again, if no other agent has
    recorded that this mode works.
    """
    config = context.config
    makers: dict[str, Callable[[], Isolation]] = {
        "bwrap": lambda: BwrapIsolation(context, cgroups, uids),
        "uid": lambda: UidIsolation(context, cgroups, uids, trash),
        "none": lambda: NoIsolation(context, cgroups),
    }
    result = ProbeResult(None, {}, None)
    records = find_records(collect_facts(context))
    for name in ISOLATION_MODES:
        if name == "none" and not config.allow_none:
            result.modes[name] = "not allowed"
        elif result.isolation is None and config.isolation in ("auto", name):
            await _start_first_slot(makers[name](), config.network, result)
        else:
            async with records.open_record(name) as record:
                result.modes[name] = "ok" if record.proves_mode() else await _try_mode(makers[name](), config.network, trash, record)
    return result


async def _start_first_slot(isolation: Isolation, wants_network: bool, result: ProbeResult) -> None:
    """Start the first slot in a mode. If that works, the mode is used."""
    try:
        result.first_runtime = await _start_runtime(isolation, wants_network)
    except (StartFailed, OSError) as error:
        result.modes[isolation.name] = str(error)
        isolation.remove_mode_files()
    else:
        result.modes[isolation.name] = "ok"
        result.isolation = isolation


async def _try_mode(isolation: Isolation, wants_network: bool, trash: Trash, record: ModeRecord) -> str:
    """Start a slot in a mode that is not used, and end it. Keeps the proof if that works. Returns `ok`, or the error."""
    try:
        runtime = await _start_runtime(isolation, wants_network)
    except (StartFailed, OSError) as error:
        return str(error)
    else:
        proof = await isolation.end_runtime(runtime)
        trash.discard_folder(runtime.dirs.root)
        isolation.free_uid(runtime)
        if proof["clean"]:
            record.keep_proof()
        return "ok"
    finally:
        isolation.remove_mode_files()


async def _start_runtime(isolation: Isolation, wants_network: bool) -> SlotRuntime:
    return await isolation.start_runtime("0", wants_network or "none" not in isolation.networks)
