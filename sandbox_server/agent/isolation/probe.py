"""Finds out which isolation modes work on this machine by starting a slot in each of them."""

from __future__ import annotations

import dataclasses
from typing import Callable

from sandbox_server.agent.config import ISOLATION_MODES
from sandbox_server.agent.errors import StartFailed
from sandbox_server.agent.execution.slot_runtime import SlotRuntime
from sandbox_server.agent.isolation.base import Isolation, IsolationContext
from sandbox_server.agent.isolation.bwrap import BwrapIsolation
from sandbox_server.agent.isolation.none import NoIsolation
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
    """Try all modes, the strongest first. The first one that works and is permitted by the configuration is used, and its slot becomes the first slot."""
    config = context.config
    makers: dict[str, Callable[[], Isolation]] = {
        "bwrap": lambda: BwrapIsolation(context, cgroups, uids),
        "uid": lambda: UidIsolation(context, cgroups, uids, trash),
        "none": lambda: NoIsolation(context, cgroups),
    }
    result = ProbeResult(None, {}, None)
    for name in ISOLATION_MODES:
        if name == "none" and not config.allow_none:
            result.modes[name] = "not allowed"
            continue
        isolation = makers[name]()
        try:
            runtime = await isolation.start_runtime("0", config.network or "none" not in isolation.networks)
        except (StartFailed, OSError) as error:
            result.modes[name] = str(error)
            isolation.remove_mode_files()
            continue
        result.modes[name] = "ok"
        if result.isolation is None and config.isolation in ("auto", name):
            result.isolation, result.first_runtime = isolation, runtime
        else:
            await isolation.end_runtime(runtime)
            trash.discard_folder(runtime.dirs.root)
            isolation.free_uid(runtime)
            isolation.remove_mode_files()
    return result
