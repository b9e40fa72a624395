"""Which isolation modes work here: each is tried by starting a slot in it, and each says what it met."""

from __future__ import annotations

import dataclasses
from typing import Callable

from sandbox_server.agent.config import ISOLATION_MODES
from sandbox_server.agent.errors import StartFailed
from sandbox_server.agent.execution.slot_runtime import SlotRuntime
from sandbox_server.agent.isolation.base import Context, Isolation
from sandbox_server.agent.isolation.bwrap import Bwrap
from sandbox_server.agent.isolation.none import Nothing
from sandbox_server.agent.isolation.uid import Uid
from sandbox_server.agent.kernel.cgroups import Cgroups
from sandbox_server.agent.kernel.trash import Trash
from sandbox_server.agent.kernel.uids import UidRange


@dataclasses.dataclass
class Probed:
    """What was found: the mode to use (None: no allowed one works), every mode's verdict, and the body the probe started in that mode."""

    isolation: Isolation | None
    modes: dict[str, str]
    first_body: SlotRuntime | None


async def probe(context: Context, cgroups: Cgroups, trash: Trash, uids: UidRange) -> Probed:
    """Try the modes one by one, best first. The first that works and is wanted is used; its probe becomes the first slot."""
    config = context.config
    makers: dict[str, Callable[[], Isolation]] = {
        "bwrap": lambda: Bwrap(context, cgroups, uids),
        "uid": lambda: Uid(context, cgroups, uids, trash),
        "none": lambda: Nothing(context, cgroups),
    }
    result = Probed(None, {}, None)
    for name in ISOLATION_MODES:
        if name == "none" and not config.allow_none:
            result.modes[name] = "not allowed"
            continue
        isolation = makers[name]()
        try:
            body = await isolation.start("0", config.network or "none" not in isolation.networks)
        except (StartFailed, OSError) as error:
            result.modes[name] = str(error)
            isolation.close()
            continue
        result.modes[name] = "ok"
        if result.isolation is None and config.isolation in ("auto", name):
            result.isolation, result.first_body = isolation, body
        else:
            await isolation.end(body)
            trash.throw(body.dirs.root)
            isolation.forget(body)
            isolation.close()
    return result
