"""An agent for tests, in the process of the test. It sends real frames over a transport in memory, and its slots run no processes.

A test makes a fault with a subclass that overrides one method, such as `reset` to leave a slot dirty, or `answer` to refuse an operation.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sandbox_server.agent import wire
from sandbox_server.link import AgentLink

#: How long a fake agent may take to send its hello, in seconds.
HELLO_WITHIN_S = 10.0


class MemoryTransport(asyncio.Transport):
    """One end of a connection in memory. Written data arrives at the other end in the next turn of the event loop.

    Attributes:
        deliver: takes the data at the other end.
        hang_up: is called at the other end when this end is closed.
        lost: is called at this end when it is closed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.deliver: Callable[[bytes], None] | None = None
        self.hang_up: Callable[[], None] | None = None
        self.lost: Callable[[], None] | None = None
        self._closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self.deliver is not None and not self._closing:
            asyncio.get_running_loop().call_soon(self._arrive, bytes(data))

    def _arrive(self, data: bytes) -> None:
        if self.deliver is not None and not self._closing:
            self.deliver(data)

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self._closing

    def abort(self) -> None:
        self.close()

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            for callback in (self.hang_up, self.lost):
                if callback is not None:
                    asyncio.get_running_loop().call_soon(callback)


class FakeLink(AgentLink):
    """A link whose other end is in this process."""

    @classmethod
    async def to(cls, agent: FakeAgent, token: str) -> FakeLink:
        """Connect to a fake agent and exchange hellos.

        Raises:
            LinkLost: the agent closed the connection before its hello.
            TimeoutError: it sent no hello in time.
        """
        link = cls(asyncio.get_running_loop())
        transport = MemoryTransport()
        transport.lost = lambda: link.connection_lost(None)
        link.connection_made(transport)
        agent.accept(transport, link.data_received, transport.lost)
        await link.exchange_hellos(token, HELLO_WITHIN_S)
        return link


@dataclass(eq=False)
class FakeSlot:
    """A slot without processes."""

    slot_id: str
    epoch: int = 1
    state: str = "ready"
    has_network: bool = True
    cache: str | None = None
    read_only: list[str] = field(default_factory=list)
    detail: str = ""
    evidence: Mapping[str, Any] = field(default_factory=dict)

    def meta(self) -> dict[str, Any]:
        """The slot as the `watch` operation reports it."""
        return {
            "slot_id": self.slot_id, "epoch": self.epoch, "state": self.state, "workspace": "/workspace", "tmp": "/tmp",
            "isolation": "bwrap", "network": self.has_network, "detail": self.detail, "evidence": self.evidence,
        }  # fmt: skip


class _Peer:
    """The agent's end of one connection."""

    def __init__(self, send: Callable[[bytes], object], close: Callable[[], object]) -> None:
        self.wire = wire.Connection(opens_odd=False)
        self.watches: list[int] = []
        self.send = send
        self.close = close

    def flush(self) -> None:
        if self.wire.has_data_to_send():
            self.send(self.wire.data_to_send())


class FakeAgent:
    """An agent without processes.

    Args:
        sandbox_id: the id of its sandbox.
        token: the token that a service must send.
        slots: how many slots it has.
        isolation: the isolation mode that it reports; None to report an error instead.
    """

    def __init__(self, sandbox_id: str, token: str = "token", slots: int = 2, isolation: str | None = "bwrap") -> None:
        self.sandbox_id = sandbox_id
        self.token = token
        self.isolation = isolation
        self.boot = secrets.token_hex(8)
        self.slots = {str(n): FakeSlot(str(n)) for n in range(slots)}
        self.requests: list[dict[str, Any]] = []
        self.networks = ["none", "shared"]
        self.can_make_read_only = True
        self.caches: set[str] = set()
        self._peers: list[_Peer] = []

    def hello(self) -> dict[str, Any]:
        """The content of its hello."""
        tools = ["bash", "read_file"]
        return {
            "v": 1, "boot": self.boot, "sandbox_id": self.sandbox_id, "agent_version": "fake", "isolation": self.isolation,
            "error": None if self.isolation else "no mode works: this agent is a fake",
            "capabilities": {
                "modes": {"bwrap": "ok"}, "network": self.networks, "cache": True, "read_only": self.can_make_read_only, "limits": {}, "kill": "scan",
                "proves": [], "tools": tools,
            },
        }  # fmt: skip

    def accept(self, transport: MemoryTransport, send: Callable[[bytes], None], hang_up: Callable[[], None]) -> None:
        """Accept a connection of a service.

        Args:
            transport: the service's end of the connection.
            send: passes data to the service.
            hang_up: is called when the agent closes the connection.
        """
        loop = asyncio.get_running_loop()

        def arrive(data: bytes) -> None:
            if not transport.is_closing():
                send(data)

        peer = _Peer(lambda data: loop.call_soon(arrive, data), lambda: loop.call_soon(hang_up))
        transport.deliver = lambda data: self._receive(peer, data)
        transport.hang_up = lambda: self._peers.remove(peer) if peer in self._peers else None
        self._peers.append(peer)

    def hang_up(self) -> None:
        """Close every connection, as happens when the network fails or the agent ends."""
        peers, self._peers = self._peers, []
        for peer in peers:
            peer.close()

    def find_requests(self, op: str) -> list[dict[str, Any]]:
        """Return the requests of one operation, in their order."""
        return [request for request in self.requests if request.get("op") == op]

    def announce_end(self) -> None:
        """Say that this agent shuts down, as an agent does before it ends its calls."""
        self._report({"slots": [], "agent_ends": True})

    def set_slot(self, slot_id: str, state: str, detail: str = "", evidence: Mapping[str, Any] | None = None) -> None:
        """Change the state of a slot, and report it to every service that watches."""
        slot = self.slots[slot_id]
        slot.state, slot.detail, slot.evidence = state, detail, evidence or {}
        self._report({"slots": [slot.meta()]})

    def reset(self, slot: FakeSlot, meta: dict[str, Any]) -> dict[str, Any]:
        """Reset a slot. Returns the content of the END frame of the reset."""
        slot.epoch, slot.has_network, slot.cache, slot.read_only, slot.state = meta["epoch"], meta["network"], None, [], "ready"
        return {"state": "ready", "detail": "", "proof": {}, "duration_s": 0.0}

    def verify(self, slot: FakeSlot, meta: dict[str, Any]) -> dict[str, Any]:
        """Verify a slot. Returns the content of the END frame of the test, which found every planted leftover."""
        planted = [{"kind": "file", "detail": "/workspace/left"}, {"kind": "process", "detail": "sleep"}]
        return {"planted": planted, "found": ["file", "process"], "left": [], "clean": True, **self.reset(slot, meta)}

    def equip(self, slot: FakeSlot, meta: dict[str, Any]) -> dict[str, Any]:
        """Give a slot its cache. Returns the content of the END frame of the operation."""
        slot.has_network, slot.cache = meta["network"], meta["cache"]
        self.caches.add(meta["cache"])
        return {}

    def narrow(self, slot: FakeSlot, meta: dict[str, Any]) -> dict[str, Any]:
        """Take rights away from a slot. Returns the content of the END frame of the operation."""
        if (meta["network"] and not slot.has_network) or meta.get("cache") not in (None, slot.cache):
            return {"code": "invalid", "detail": "narrow only takes rights away"}
        slot.has_network, slot.cache = meta["network"], meta.get("cache")
        slot.read_only += [name for name in meta.get("read_only", ()) if name not in slot.read_only]
        return {"read_only": slot.read_only} if slot.read_only else {}

    def answer(self, meta: dict[str, Any]) -> dict[str, Any]:
        """Carry out a request. Returns the content of its END frame, or `{"code", "detail"}` to refuse the request."""
        op = meta.get("op")
        if op == "cache_drop":
            self.caches.discard(meta["cache"])
            return {}
        if op not in ("reset", "verify", "equip", "narrow", "quiet"):
            return {"code": "not_implemented", "detail": f"a fake agent has no {op}"}
        slot = self.slots.get(str(meta.get("slot")))
        if slot is None:
            return {"code": "unknown_slot", "detail": "there is no such slot"}
        if meta["epoch"] < slot.epoch or (meta["epoch"] > slot.epoch and op not in ("reset", "verify")):
            return {"code": "stale_epoch", "detail": "the slot has moved on"}
        if op == "quiet":
            return {"ran": False}
        act = {"reset": self.reset, "verify": self.verify, "equip": self.equip, "narrow": self.narrow}[str(op)]
        answer = act(slot, meta)
        if answer.get("state") == "ready":
            # As a real agent does, it reports the clean slot to those that watch before it answers the request.
            self._report({"slots": [slot.meta()]})
        return answer

    def _receive(self, peer: _Peer, data: bytes) -> None:
        if peer not in self._peers:
            return
        for event in peer.wire.receive(data):
            if isinstance(event, wire.Hello):
                if event.meta.get("token") != self.token:
                    self._peers.remove(peer)
                    peer.close()
                    return
                peer.wire.hello(self.hello())
            elif isinstance(event, wire.Opened):
                self._receive_request(peer, event)
        peer.flush()

    def _receive_request(self, peer: _Peer, event: wire.Opened) -> None:
        self.requests.append(event.meta)
        if event.meta.get("op") == "watch":
            peer.watches.append(event.stream)
            peer.wire.send_item(event.stream, {"slots": [slot.meta() for slot in self.slots.values()]})
            return
        self.respond(event.meta, lambda answer: self._send_answer(peer, event.stream, answer))

    def respond(self, meta: dict[str, Any], send_answer: Callable[[dict[str, Any]], None]) -> None:
        """Answer a request. A subclass that answers late keeps `send_answer` and calls it later."""
        send_answer(self.answer(meta))

    def _send_answer(self, peer: _Peer, stream: int, answer: dict[str, Any]) -> None:
        if not peer.wire.is_open(stream):
            return
        if "code" in answer:
            peer.wire.abort(stream, answer)
        else:
            peer.wire.end(stream, answer)
        peer.flush()

    def _report(self, update: Mapping[str, Any]) -> None:
        for peer in self._peers:
            for stream in peer.watches:
                if peer.wire.is_open(stream):
                    peer.wire.send_item(stream, dict(update))
            peer.flush()
