"""Verifies that a reset leaves nothing behind: plants leftovers of every kind in a free slot, resets the slot as usual, and searches for what is still there.

The leftovers are searched for from inside the slot and from outside. The first search is made before the reset: only for a leftover that was found then does
its absence after the reset prove anything.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import Any, Mapping

from sandbox_server.agent.errors import Refused
from sandbox_server.agent.execution.slot_probe import NoAnswer, ask_slot
from sandbox_server.agent.execution.slot_runtime import SlotRuntime
from sandbox_server.agent.slots.host_probe import HostProbe
from sandbox_server.agent.slots.slots import READY
from sandbox_server.agent.slots.transitions import SlotTransitions

log = logging.getLogger(__name__)

ANSWER_WITHIN_S = 20.0
SETTLE_WITHIN_S = 3.0
_SEARCH_PAUSE_S = 0.02
_LINGERING = ("host_cgroup", "host_socket", "host_namespace")


class Verification:
    """One verification of the reset of one slot.

    Args:
        transitions: of the slot.
        settle_within_s: how long to wait, in seconds, until planted leftovers are found, and until the kernel has removed the last of an ended runtime.
    """

    def __init__(self, transitions: SlotTransitions, settle_within_s: float) -> None:
        self._transitions = transitions
        self._settle_within_s = settle_within_s
        self._slot = transitions.slot
        self._name = "sandbox-verify-" + secrets.token_hex(8)
        self._planting: dict[str, Any] = {}
        self._host_probe: HostProbe | None = None

    async def verify_reset(self, epoch: int, has_network: bool, old_spool_folder: str) -> dict[str, Any]:
        """Plant leftovers, search for them, reset the slot, and search again.

        Args:
            epoch: the epoch of the lease that has the slot afterwards.
            has_network: whether that lease has the network.
            old_spool_folder: the folder with the outputs of the lease before, which is deleted.

        Returns:
            The answer of a reset, with `planted`, `refused`, `found`, `unseen`, `left` and `clean` in addition.
        """
        began = self._slot.loop.time()
        async with self._transitions.exchange_lock:
            self._transitions.runtimes.trash.discard_folder(old_spool_folder)
            before: dict[str, str] = {}
            problem = None
            try:
                await self._plant(self._slot.current_runtime())
            except (NoAnswer, Refused) as error:
                problem = "nothing could be planted: %s" % error
            else:
                before = await self._search_until_all_found()
            proof = await self._transitions.replace_runtime(has_network, keeps_files=False)
            left: dict[str, str] = {}
            if problem is None:
                left, problem = await self._search_after_reset()
            if proof.get("clean") and (left or problem):
                proof = dict(proof, clean=False, detail=problem or "its reset left %s" % ", ".join("%s (%s)" % item for item in sorted(left.items())))
            done = self._transitions.apply_proof(epoch, proof, self._slot.loop.time() - began)
            if self._host_probe is not None:
                self._host_probe.close_probe()
            return dict(done, clean=bool(proof.get("clean")), **self._report(before, left))

    async def _ask(self, runtime: SlotRuntime, tool: str, args: Mapping[str, Any]) -> dict[str, Any]:
        return await ask_slot(runtime, self._slot.drains, tool, args, ANSWER_WITHIN_S)

    async def _plant(self, runtime: SlotRuntime) -> None:
        self._planting = await self._ask(runtime, "leftovers_plant", {"name": self._name, "shell": runtime.shell})
        self._host_probe = HostProbe(runtime, self._name, _number(self._planting.get("inode")))

    async def _search(self) -> dict[str, str]:
        """Return what is there now: kind -> details. The kinds that were found from outside of the slot begin with `host_`."""
        found: dict[str, str] = {}
        runtime = self._slot.runtime
        if runtime is not None and not runtime.link.closed:
            args = {"name": self._name, **{key: _number(self._planting.get(key)) for key in ("inode", "nice", "processors")}}
            answer = (await self._ask(runtime, "leftovers_find", args)).get("found")
            if not isinstance(answer, dict):
                raise NoAnswer("its answer is not an object")
            found.update((str(kind), str(detail)) for kind, detail in answer.items())
        found.update(await self._search_from_host())
        return found

    async def _search_from_host(self) -> dict[str, str]:
        return await self._slot.loop.run_in_executor(None, self._host_probe.find_leftovers) if self._host_probe is not None else {}

    async def _search_until_all_found(self) -> dict[str, str]:
        """Search until everything that was planted is found. Planted processes need a moment to reach their final state."""
        planted = {item["kind"] for item in _items(self._planting.get("planted"))}
        deadline = self._slot.loop.time() + self._settle_within_s
        while True:
            try:
                found = await self._search()
            except NoAnswer as error:
                # The planted processes may have used up what the slot is allowed. What cannot be found now is reported as unseen.
                log.info("the leftovers could not be searched for from inside the slot: %s", error, extra={"slot_id": self._slot.slot_id})
                return await self._search_from_host()
            if planted <= set(found) or self._slot.loop.time() > deadline:
                return found
            await asyncio.sleep(_SEARCH_PAUSE_S)

    async def _search_after_reset(self) -> tuple[dict[str, str], str | None]:
        """Return what is left after the reset, and why the search failed, if it did. The kernel needs a moment to remove the last of an ended runtime."""
        left: dict[str, str] = {}
        deadline = self._slot.loop.time() + self._settle_within_s
        try:
            while True:
                left = await self._search()
                if not set(left) & set(_LINGERING) or self._slot.loop.time() > deadline:
                    break
                await asyncio.sleep(_SEARCH_PAUSE_S)
            if left and self._host_probe is not None:
                await self._slot.loop.run_in_executor(None, self._host_probe.remove_leftovers)
        except NoAnswer as error:
            return left, "what the reset has left could not be searched for: %s" % error
        except OSError as error:
            log.warning("what a reset has left could not be removed: %s", error, extra={"slot_id": self._slot.slot_id})
        return left, None

    def _report(self, before: Mapping[str, str], left: Mapping[str, str]) -> dict[str, Any]:
        planted = _items(self._planting.get("planted"))
        return {
            "planted": planted,
            "refused": _items(self._planting.get("refused")),
            "found": sorted(set(before) - set(left)),
            "unseen": sorted({item["kind"] for item in planted} - set(before)),
            "left": sorted(left),
            "left_details": dict(left),
        }


def _items(value: Any) -> list[dict[str, str]]:
    """A list of kinds and details from a slot, without what does not fit."""
    return [{"kind": str(item.get("kind")), "detail": str(item.get("detail"))} for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _number(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def start_verification(transitions: SlotTransitions, epoch: Any, has_network: bool, settle_within_s: float = SETTLE_WITHIN_S) -> asyncio.Task[dict[str, Any]]:
    """Begin to verify the reset of a slot that no lease holds. Afterwards the slot has the given epoch, or is in quarantine.

    Args:
        transitions: of the slot.
        epoch: the epoch of the lease that has the slot afterwards.
        has_network: whether that lease has the network.
        settle_within_s: see `Verification`.

    Returns:
        The task, whose result is the answer to the service. A repeated request with the same epoch gets the same task.

    Raises:
        Refused: the slot cannot be reset, or is not ready.
    """
    renewal = transitions.find_renewal(epoch)
    if renewal is not None:
        return renewal
    transitions.check_can_renew(epoch, has_network)
    if transitions.slot.state != READY:
        raise Refused("slot_unavailable", "slot %s is %s: only a slot that is ready can be verified" % (transitions.slot.slot_id, transitions.slot.state))
    old_spool_folder = transitions.slot.begin_lease(epoch)
    return transitions.start_renewal(Verification(transitions, settle_within_s).verify_reset(epoch, has_network, old_spool_folder))
