"""Putting a reset to the test: leftovers of every kind are planted in a free slot, it is reset as ever, and whatever is still there is found.

What was planted is looked for from inside and from outside, before the reset as well: only what could be seen then proves something by being gone.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import Any, Mapping

from sandbox_server.agent.errors import Refused
from sandbox_server.agent.execution.slot_runtime import SlotRuntime
from sandbox_server.agent.slots.host_probe import Outside
from sandbox_server.agent.slots.slot_probe import NoAnswer, ask_slot
from sandbox_server.agent.slots.slots import READY
from sandbox_server.agent.slots.transitions import SlotTransitions

log = logging.getLogger(__name__)

ANSWER_WITHIN_S = 20.0
_SETTLE_WITHIN_S = 3.0
_BETWEEN_LOOKS_S = 0.02
_LINGERING = ("host_cgroup", "host_socket", "host_namespace")


class Verification:
    """One test of one slot's reset."""

    def __init__(self, changes: SlotTransitions) -> None:
        self._changes = changes
        self._slot = changes.slot
        self._name = "sandbox-verify-" + secrets.token_hex(8)
        self._planting: dict[str, Any] = {}
        self._outside: Outside | None = None

    async def run(self, epoch: int, network: bool, old_spool: str) -> dict[str, Any]:
        """Plant, look, reset, look again.

        Returns:
            What `reset` answers, and `planted`, `refused`, `found`, `unseen`, `left` and `clean`.
        """
        began = self._slot.loop.time()
        async with self._changes.turn():
            self._changes.bodies.trash.throw(old_spool)
            before: dict[str, str] = {}
            problem = None
            try:
                await self._plant(self._slot.current_body())
            except (NoAnswer, Refused) as error:
                problem = "nothing could be planted: %s" % error
            else:
                before = await self._look_until_all_is_seen()
            proof = await self._changes.renew(network, keep=False)
            left: dict[str, str] = {}
            if problem is None:
                left, problem = await self._look_again()
            if proof.get("clean") and (left or problem):
                proof = dict(proof, clean=False, detail=problem or "its reset left %s" % ", ".join("%s (%s)" % item for item in sorted(left.items())))
            done = self._changes.conclude(epoch, proof, self._slot.loop.time() - began)
            if self._outside is not None:
                self._outside.close()
            return dict(done, clean=bool(proof.get("clean")), **self._report(before, left))

    async def _ask(self, body: SlotRuntime, tool: str, args: Mapping[str, Any]) -> dict[str, Any]:
        return await ask_slot(body, self._slot.drains, tool, args, ANSWER_WITHIN_S)

    async def _plant(self, body: SlotRuntime) -> None:
        self._planting = await self._ask(body, "leftovers_plant", {"name": self._name, "shell": body.shell})
        self._outside = Outside(body, self._name, _number(self._planting.get("inode")))

    async def _look(self) -> dict[str, str]:
        """What is there now, by whom it can be seen."""
        seen: dict[str, str] = {}
        body = self._slot.body
        if body is not None and not body.link.closed:
            args = {"name": self._name, **{key: _number(self._planting.get(key)) for key in ("inode", "nice", "processors")}}
            answer = (await self._ask(body, "leftovers_find", args)).get("found")
            if not isinstance(answer, dict):
                raise NoAnswer("it answered nonsense")
            seen.update((str(kind), str(detail)) for kind, detail in answer.items())
        seen.update(await self._look_outside())
        return seen

    async def _look_outside(self) -> dict[str, str]:
        return await self._slot.loop.run_in_executor(None, self._outside.look) if self._outside is not None else {}

    async def _look_until_all_is_seen(self) -> dict[str, str]:
        """Planted processes need a moment until they are what they are to be."""
        planted = {item["kind"] for item in _items(self._planting.get("planted"))}
        deadline = self._slot.loop.time() + _SETTLE_WITHIN_S
        while True:
            try:
                seen = await self._look()
            except NoAnswer as error:
                # The planted processes may be all that a slot is allowed. What is not seen now is reported as unseen.
                log.info("what was planted could not be looked at from inside: %s", error, extra={"slot_id": self._slot.slot_id})
                return await self._look_outside()
            if planted <= set(seen) or self._slot.loop.time() > deadline:
                return seen
            await asyncio.sleep(_BETWEEN_LOOKS_S)

    async def _look_again(self) -> tuple[dict[str, str], str | None]:
        """What survived, and what kept us from looking. The kernel needs a moment to take the last of an ended body apart."""
        left: dict[str, str] = {}
        deadline = self._slot.loop.time() + _SETTLE_WITHIN_S
        try:
            while True:
                left = await self._look()
                if not set(left) & set(_LINGERING) or self._slot.loop.time() > deadline:
                    break
                await asyncio.sleep(_BETWEEN_LOOKS_S)
            if left and self._outside is not None:
                await self._slot.loop.run_in_executor(None, self._outside.tidy)
        except NoAnswer as error:
            return left, "what is left could not be looked for: %s" % error
        except OSError as error:
            log.warning("what a reset left could not be tidied up: %s", error, extra={"slot_id": self._slot.slot_id})
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
    """Kinds and details, as a slot has said them."""
    return [{"kind": str(item.get("kind")), "detail": str(item.get("detail"))} for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _number(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def verify(changes: SlotTransitions, epoch: Any, network: bool) -> asyncio.Task[dict[str, Any]]:
    """Test the reset of a slot that nobody holds; it then belongs to the epoch given, or is in quarantine.

    Returns:
        The task; asking again with the same epoch, be it for a reset, gives the same one.

    Raises:
        Refused: the slot cannot be reset, or is not ready.
    """
    again = changes.answer_for(epoch)
    if again is not None:
        return again
    changes.check_next(epoch, network)
    if changes.slot.state != READY:
        raise Refused("slot_unavailable", "slot %s is %s: only a slot that is ready can be verified" % (changes.slot.slot_id, changes.slot.state))
    return changes.begin(Verification(changes).run(epoch, network, changes.slot.move_on(epoch)))
