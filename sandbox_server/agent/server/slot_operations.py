"""The operations on a whole slot, and the stream on which the service watches all slots."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Awaitable, Callable, Mapping

from sandbox_server.agent.errors import Refused
from sandbox_server.agent.server.connections import Stream
from sandbox_server.agent.slots.slots import RESETTING, AgentSlot
from sandbox_server.agent.slots.transitions import SlotTransitions
from sandbox_server.agent.slots.verify import start_verification

log = logging.getLogger(__name__)

_REPORT_RESET_AFTER_S = 0.05


class CoroutineStream:
    """A stream that one coroutine serves.

    Args:
        stream: the stream.
        serve: makes the coroutine.
        cancel_on_abort: cancel the coroutine when the stream is aborted. Otherwise it runs to its end.
    """

    def __init__(self, stream: Stream, serve: Callable[[], Awaitable[None]], cancel_on_abort: bool) -> None:
        self._stream = stream
        self._cancel_on_abort = cancel_on_abort
        self._task = asyncio.get_event_loop().create_task(self._serve(serve))

    async def _serve(self, serve: Callable[[], Awaitable[None]]) -> None:
        try:
            await serve()
        except Refused as error:
            self._stream.refuse(error)
        except Exception as error:  # the failure of one stream must not end the agent
            log.exception("a stream failed")
            self._stream.refuse(Refused("internal", "%s: %s" % (type(error).__name__, error)))

    def on_item(self, meta: dict[str, Any], body: bytes) -> None:
        """See `StreamHandler`."""
        raise Refused("invalid", "this stream takes no items")

    def on_data(self, body: bytes) -> None:
        """See `StreamHandler`."""
        raise Refused("invalid", "this stream takes no data")

    def on_end(self) -> None:
        """See `StreamHandler`. The request was complete when the stream was opened."""

    def on_abort(self) -> None:
        """See `StreamHandler`."""
        if self._cancel_on_abort:
            self._task.cancel()


class WatchStream:
    """Sends all slots, and from then on every slot that has changed.

    Args:
        stream: the stream.
        slots: all slots.
        on_closed: called with this object once the stream is over.
    """

    def __init__(self, stream: Stream, slots: Mapping[str, AgentSlot], on_closed: Callable[[WatchStream], None]) -> None:
        self._stream = stream
        self._on_closed = on_closed
        self._changed_slots: dict[str, AgentSlot] = {}
        self._planned_send: asyncio.Handle | None = None
        self._sends_soon = False
        stream.send_item({"slots": [slot.view() for slot in slots.values()]})

    def report_slot(self, slot: AgentSlot) -> None:
        """Send a slot that has changed. Several changes in one turn of the event loop become one message.

        That a slot is being reset is known to the service, which has ordered it. Therefore this is only sent if the reset takes a while.
        """
        self._changed_slots[slot.slot_id] = slot
        loop = asyncio.get_event_loop()
        if slot.state != RESETTING and not self._sends_soon:
            if self._planned_send is not None:
                self._planned_send.cancel()
            self._planned_send, self._sends_soon = loop.call_soon(self._send_changes), True
        elif self._planned_send is None:
            self._planned_send = loop.call_later(_REPORT_RESET_AFTER_S, self._send_changes)

    def report_effective_limits(self, effective: Mapping[str, Any]) -> None:
        """Send the limits that each slot has from now on."""
        self._stream.send_item({"slots": [], "effective": effective})

    def report_end_of_agent(self) -> None:
        """Say that the agent shuts down and refuses every call from now on. The service then sends it none, whose outcome would be unknown."""
        self._stream.send_item({"slots": [], "agent_ends": True})

    def _send_changes(self) -> None:
        slots, self._changed_slots = self._changed_slots, {}
        self._planned_send, self._sends_soon = None, False
        self._stream.send_item({"slots": [slot.view() for slot in slots.values()]})

    def on_item(self, meta: dict[str, Any], body: bytes) -> None:
        """See `StreamHandler`. Items are ignored."""

    def on_data(self, body: bytes) -> None:
        """See `StreamHandler`. Data is ignored."""

    def on_end(self) -> None:
        """See `StreamHandler`. The service sends nothing on this stream."""

    def on_abort(self) -> None:
        """See `StreamHandler`."""
        self._on_closed(self)


async def reset_slot(stream: Stream, transitions: SlotTransitions, meta: Mapping[str, Any]) -> None:
    """Clean the slot for its next holder. The reset continues when the stream is aborted."""
    task = transitions.start_reset(meta.get("epoch"), bool(meta.get("network", True)), bool(meta.get("keep", False)))
    # This sends the answer together with the state of the slot, which wakes the service once. What the task raises is raised, and sent, from here.
    task.add_done_callback(lambda ended: None if ended.cancelled() or ended.exception() is not None else stream.end_stream(ended.result()))
    await asyncio.shield(task)


async def verify_slot(stream: Stream, transitions: SlotTransitions, meta: Mapping[str, Any]) -> None:
    """Verify the reset of the slot. The verification continues when the stream is aborted."""
    task = start_verification(transitions, meta.get("epoch"), bool(meta.get("network", True)))
    stream.end_stream(await asyncio.shield(task))


async def equip_slot(stream: Stream, transitions: SlotTransitions, meta: Mapping[str, Any]) -> None:
    """Give the holder of the slot a cache, and the network or not."""
    transitions.slot.check_admits(meta.get("epoch"))
    await transitions.equip_slot(meta.get("network", True) is not False, meta.get("cache"))
    if meta.get("allow_hosts") is not None:
        await transitions.limit_hosts(meta["allow_hosts"])
    stream.end_stream()


async def narrow_slot(stream: Stream, transitions: SlotTransitions, meta: Mapping[str, Any]) -> None:
    """Take rights away from the holder of the slot."""
    transitions.slot.check_admits(meta.get("epoch"))
    read_only = await transitions.narrow_slot(meta.get("network") is True, meta.get("cache"), meta.get("read_only") or ())
    if meta.get("allow_hosts") is not None:
        await transitions.limit_hosts(meta["allow_hosts"])
    stream.end_stream({"read_only": read_only} if read_only else None)
