"""How a slot changes hands and rights: reset, equip, narrow. Each ends the slot's body, proves its end and starts another; one at a time."""

from __future__ import annotations

import asyncio
from typing import Any, Coroutine

from sandbox_server.agent.errors import Refused, StartFailed
from sandbox_server.agent.execution.slot_runtime import CacheFolder, SlotRuntime
from sandbox_server.agent.isolation.base import find_dirs_problem
from sandbox_server.agent.slots.runtimes import RuntimePool
from sandbox_server.agent.slots.slots import BROKEN, QUARANTINED, READY, RESETTING, STARTING, Slot


class SlotTransitions:
    """The changes of one slot.

    Args:
        slot: whose.
        bodies: where bodies come from.
    """

    def __init__(self, slot: Slot, bodies: RuntimePool) -> None:
        self.slot = slot
        self.bodies = bodies
        self._turn = asyncio.Lock()
        self._answer: asyncio.Task[dict[str, Any]] | None = None
        self._unproven: SlotRuntime | None = None

    # A new holder.

    def reset(self, epoch: Any, network: bool, keep: bool) -> asyncio.Task[dict[str, Any]]:
        """Make the slot clean for its next holder, whose epoch is given; everything older is refused from this moment.

        Returns:
            The task; asking again with the same epoch gives the same one.

        Raises:
            Refused: the epoch is not newer, or the mode has no slots without network.
        """
        again = self.answer_for(epoch)
        if again is not None:
            return again
        self.check_next(epoch, network)
        old_spool = self.slot.move_on(epoch)
        return self.begin(self._reset(epoch, network, keep, old_spool))

    def answer_for(self, epoch: Any) -> asyncio.Task[dict[str, Any]] | None:
        """What already makes the slot this epoch's holder's, if it was asked before."""
        return self._answer if epoch == self.slot.epoch else None

    def check_next(self, epoch: Any, network: bool) -> None:
        """Whether the slot can be made the next holder's.

        Raises:
            Refused: it cannot.
        """
        slot = self.slot
        if isinstance(epoch, bool) or not isinstance(epoch, int):
            raise Refused("invalid", "epoch must be an integer")
        if slot.state == STARTING:
            raise Refused("slot_unavailable", "slot %s is still starting" % slot.slot_id)
        if epoch <= slot.epoch:
            raise Refused("stale_epoch", "slot %s is at epoch %d, not below %d" % (slot.slot_id, slot.epoch, epoch))
        if not network:
            self._check_can_be_offline()

    def begin(self, work: Coroutine[Any, Any, dict[str, Any]]) -> asyncio.Task[dict[str, Any]]:
        """Set going what makes the slot the next holder's; `reset` and `verify` of that holder's epoch answer with what comes of it."""
        if self.slot.state != QUARANTINED:
            self.slot.become(RESETTING)
        self._answer = self.slot.loop.create_task(work)
        return self._answer

    async def _reset(self, epoch: int, network: bool, keep: bool, old_spool: str) -> dict[str, Any]:
        began = self.slot.loop.time()
        async with self._turn:
            self.bodies.trash.throw(old_spool)
            if self.slot.state == QUARANTINED:
                return {"state": QUARANTINED, "detail": self.slot.detail, "proof": {}, "duration_s": 0.0}
            proof = await self.renew(network, keep)
            return self.conclude(epoch, proof, self.slot.loop.time() - began)

    async def renew(self, network: bool, keep: bool) -> dict[str, Any]:
        """Exchange the body for the next holder's; the proof of the old one's end, `broken` where no new one could be started."""
        try:
            return await self._exchange(network, keep, None)
        except (StartFailed, OSError) as error:
            return {"clean": False, "broken": True, "detail": str(error)}

    def conclude(self, epoch: int, proof: dict[str, Any], duration_s: float) -> dict[str, Any]:
        """Put the slot into the state that the proof allows, unless it belongs to yet another holder by now, and say so."""
        detail = None if proof.get("clean") else str(proof.get("detail", "the end of the slot could not be proven"))
        if proof.get("clean"):
            state = READY
        elif proof.get("broken"):
            state = BROKEN
        else:
            state = QUARANTINED
        if epoch == self.slot.epoch or state == QUARANTINED:
            self.slot.become(state, detail)
        return {"state": READY if state == READY else QUARANTINED, "detail": detail, "proof": proof, "duration_s": duration_s}

    def turn(self) -> asyncio.Lock:
        """Held while a body is exchanged."""
        return self._turn

    async def _exchange(self, network: bool, keep: bool, cache: CacheFolder | None) -> dict[str, Any]:
        """End the old body; when its end is proven, take a new one."""
        slot = self.slot
        proof: dict[str, Any] = {"clean": True}
        old = slot.give_up_body() or self._unproven
        if old is not None:
            # Kept until its end is proven: an exchange that breaks off must not look to the next one as if there had been nothing to end.
            self._unproven = old
            proof = await self.bodies.end(old, keep)
            if not proof["clean"]:
                return proof
            self._unproven = None
        if keep and old is not None:
            body = await self.bodies.again(old, slot.slot_id, network, cache)
        else:
            body = await self.bodies.new(slot.slot_id, network)
            wrong = find_dirs_problem(body.dirs, body.uid)
            proof["workspace_empty"] = wrong is None
            if wrong is not None:
                proof.update(clean=False, detail=wrong)
        if not slot.take_body(body):
            proof.update(clean=False, detail="the new init has ended")
        return proof

    # The same holder, other rights.

    async def equip(self, network: bool, key: Any) -> None:
        """Give the holder a cache, and the network or not: processes end, files stay.

        Raises:
            Refused: the mode cannot, or the sandbox has no network to give.
        """
        if network and not self.bodies.config.network:
            raise Refused("invalid", "this sandbox gives its slots no network")
        if not network:
            self._check_can_be_offline()
        cache = None
        if key is not None:
            if not self.bodies.isolation.caches:
                raise Refused("not_implemented", "slots with a cache need the mode bwrap, not %s" % self.bodies.isolation.name)
            cache = self.bodies.caches.get_cache(key)
        await self._change_rights(network, cache)

    async def narrow(self, network: bool, key: Any) -> None:
        """Take away the network and the cache, as far as they are not named: processes end, files stay, and neither ever comes back to this holder.

        Raises:
            Refused: what is named is not there, or the mode cannot.
        """
        body, cache = self.slot.current_body(), self.slot.cache
        if network and not body.network:
            raise Refused("invalid", "narrow only takes rights away, and this slot has no network")
        if key is not None and (cache is None or cache.key != key):
            raise Refused("invalid", "narrow only takes rights away, and this slot does not have the cache %s" % ascii(key)[:100])
        if not network:
            self._check_can_be_offline()
        if network == body.network and (cache is None or key is not None):
            return
        await self._change_rights(network, cache if key is not None else None)

    def _check_can_be_offline(self) -> None:
        if "none" not in self.bodies.isolation.networks:
            raise Refused("not_implemented", "slots without network need the mode bwrap, not %s" % self.bodies.isolation.name)

    async def _change_rights(self, network: bool, cache: CacheFolder | None) -> None:
        slot, epoch = self.slot, self.slot.epoch
        slot.abandon_calls()
        slot.cache = cache
        slot.become(RESETTING)
        async with self._turn:
            if slot.epoch != epoch:
                raise Refused("stale_epoch", "slot %s was given back meanwhile" % slot.slot_id)
            try:
                proof = await self._exchange(network, True, cache)
            except (StartFailed, OSError) as error:
                proof = {"clean": False, "broken": True, "detail": str(error)}
            done = self.conclude(epoch, proof, 0.0)
        if done["state"] != READY:
            raise Refused("slot_unavailable", "the slot could not be started again: %s" % done["detail"])
