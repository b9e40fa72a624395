"""A fake agent that answers calls and files by a script, so that the HTTP side runs whole without a process to isolate.

Commands it knows: `true`, `exit N`, `echo TEXT`, `hang` (until cancelled or reset), `big N` (N bytes of x, of which the result carries the first
and last of its limit), `bytes` (not UTF-8), `both` (stdout and stderr), `live` (until the test lets it `write` and `finish`),
`refuse CODE` (the stream is aborted, for `agent_ends` as by an agent that shuts down), `die` (the connection ends),
`nonsense` (an answer outside the protocol's closed sets).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sandbox_server.agent import wire
from sandbox_server.agent.execution.tmux.recording import RECORDING_NAME
from sandbox_server.core.types import PoolSpec
from sandbox_server.testing import FakeAgent, FakeBackend

RECORDING = b'{"version": 2, "width": 160, "height": 40}\n[0.5, "o", "scripted"]\n'
"""The recording of every slot."""


@dataclass
class _OpenStream:
    meta: dict[str, Any]
    items: deque[dict[str, Any]] = field(default_factory=deque)
    body: bytearray = field(default_factory=bytearray)
    ended: bool = False
    busy: bool = False
    connected: bool = False


@dataclass
class _Call:
    identity: tuple[str, str]
    result: dict[str, Any] | None = None
    body: bytes = b""
    whole: bytes = b""
    is_evicted: bool = False
    followers: list[Callable[[], None]] = field(default_factory=list)
    waiting: list[Callable[[], None]] = field(default_factory=list)


class ScriptedAgent(FakeAgent):
    """An agent whose slots execute a few scripted commands."""

    def __init__(self, sandbox_id: str, token: str = "token", slots: int = 2, isolation: str | None = "bwrap") -> None:
        super().__init__(sandbox_id, token, slots, isolation)
        self.failing_archive_count = 0  # so many archives are not unpacked
        self.is_stopped = False  # does not respond, as a process after SIGSTOP
        self.ran: list[tuple[str, str]] = []
        self.files: dict[tuple[str, str], bytes] = {}
        self.calls: dict[tuple[str, int, str], _Call] = {}
        self._exchanges: dict[tuple[int, int], _OpenStream] = {}

    def reset(self, slot: Any, meta: dict[str, Any]) -> dict[str, Any]:
        for (slot_id, _, _), call in list(self.calls.items()):
            if slot_id == slot.slot_id and call.result is None:
                self._finish(call, {"reason": "cancelled", "exit_code": None, "error": "the slot was reset"}, b"")
        self.files = {key: value for key, value in self.files.items() if key[0] != slot.slot_id}
        return super().reset(slot, meta)

    def _receive(self, peer: Any, data: bytes) -> None:
        if peer not in self._peers or self.is_stopped:
            return
        for event in peer.wire.receive(data):
            if isinstance(event, wire.Hello):
                peer.wire.hello(self.hello())
            elif isinstance(event, wire.Opened):
                self._open(peer, event)
            elif isinstance(event, wire.Item | wire.Data):
                exchange = self._exchanges.get((id(peer), event.stream))
                if exchange is not None:
                    if isinstance(event, wire.Item):
                        exchange.items.append(event.meta)
                    else:
                        exchange.body += event.body
                peer.wire.acknowledge(event.stream, event.size)
            elif isinstance(event, wire.Ended):
                exchange = self._exchanges.get((id(peer), event.stream))
                if exchange is not None:
                    exchange.ended = True
            self._advance(peer, getattr(event, "stream", 0))
        peer.flush()

    def _open(self, peer: Any, event: wire.Opened) -> None:
        op = event.meta.get("op")
        if op in ("watch", "reset", "narrow"):
            self._receive_request(peer, event)
            return
        self.requests.append(event.meta)
        slot = self.slots.get(str(event.meta.get("slot")))
        if slot is None or slot.epoch != event.meta.get("epoch"):
            peer.wire.abort(event.stream, {"code": "unknown_slot" if slot is None else "stale_epoch", "detail": "the slot has moved on"})
            return
        if op == "terminal":
            peer.wire.abort(event.stream, {"code": "not_implemented", "detail": "a scripted agent has no terminals"})
            return
        self._exchanges[id(peer), event.stream] = _OpenStream(event.meta)

    def _advance(self, peer: Any, stream: int) -> None:
        exchange = self._exchanges.get((id(peer), stream))
        if exchange is None or exchange.busy:
            return
        if exchange.meta["op"] == "calls":
            self._next_call(peer, stream, exchange)
        elif exchange.meta["op"] == "port":
            self._serve_port(peer, stream, exchange)
        elif exchange.ended:
            del self._exchanges[id(peer), stream]
            self._about_calls_or_files(peer, stream, exchange)

    # Calls.

    def _next_call(self, peer: Any, stream: int, exchange: _OpenStream) -> None:
        while exchange.items:
            meta = exchange.items.popleft()
            key = (exchange.meta["slot"], exchange.meta["epoch"], meta["call_id"])
            identity = (meta["tool"], repr(sorted(meta["args"].items())))
            call = self.calls.get(key)
            if call is not None and call.identity != identity:
                self._say(peer, stream, meta, {"reason": "call_conflict", "exit_code": None, "error": "used before", "lens": []}, b"")
                continue
            if call is None:
                call = self.calls[key] = _Call(identity)
                self.ran.append((meta["call_id"], str(meta["args"].get("command"))))
                if not self._run(peer, stream, meta, call):
                    return
            if call.result is None:
                exchange.busy = True

                def resume(meta: dict[str, Any] = meta, call: _Call = call) -> None:
                    exchange.busy = False
                    self._say(peer, stream, meta, call.result or {}, call.body)
                    self._next_call(peer, stream, exchange)
                    peer.flush()

                call.waiting.append(resume)
                return
            self._say(peer, stream, meta, call.result, call.body)
        if exchange.ended and peer.wire.is_open(stream):
            self._exchanges.pop((id(peer), stream), None)
            peer.wire.end(stream)

    def _run(self, peer: Any, stream: int, meta: dict[str, Any], call: _Call) -> bool:
        """Start a call; return False at the end of the stream."""
        if meta["tool"] not in ("bash", "terminal"):
            call.result = {"reason": "invalid_args", "exit_code": None, "error": f"tool: there is no {meta['tool']}"}
            return True
        verb, _, rest = str(meta["args"].get("command", "")).partition(" ")
        if verb == "refuse":
            ending = {"code": "slot_unavailable", "agent_ends": True} if rest == "agent_ends" else {"code": rest}
            peer.wire.abort(stream, {**ending, "detail": "told to refuse"})
            self.calls = {key: known for key, known in self.calls.items() if known is not call}
            return False
        if verb == "die":
            self.hang_up()
            return False
        if verb == "nonsense":
            call.result, call.body = {"reason": "sorcery", "exit_code": 0}, b""
        elif verb not in ("hang", "live"):
            output = {"echo": rest.encode() + b"\n", "big": b"x" * int(rest or 0) if verb == "big" else b"", "bytes": b"\xff\x00a"}.get(verb, b"")
            lens = [3, 2] if verb == "both" else [len(output)]
            call.whole = b"outer" if verb == "both" else output
            limit = meta["output_limit_bytes"]
            is_cut = len(call.whole) > limit
            call.body = call.whole[: limit // 2] + call.whole[len(call.whole) - limit // 2 :] if is_cut else call.whole
            lens = [len(call.body)] if is_cut else lens
            exit_code = int(rest) if verb == "exit" else 0
            call.result = {"reason": "exit", "exit_code": exit_code, "lens": lens, "output_bytes": len(call.whole), "truncated": is_cut}
        return True

    def _finish(self, call: _Call, result: dict[str, Any], body: bytes) -> None:
        call.result, call.body = {"output_bytes": len(call.whole), **result}, body
        waiting, call.waiting = call.waiting, []
        for resume in waiting:
            resume()
        for follow in call.followers:
            follow()

    def live(self, call_id: str) -> _Call:
        """A call that has started."""
        (call,) = [call for (_, _, name), call in self.calls.items() if name == call_id]
        return call

    def write(self, call_id: str, output: bytes) -> None:
        """Write output in a `live` call."""
        call = self.live(call_id)
        call.whole += output
        for follow in call.followers:
            follow()

    def finish(self, call_id: str, exit_code: int = 0) -> None:
        """End a `live` call."""
        call = self.live(call_id)
        self._finish(call, {"reason": "exit", "exit_code": exit_code}, call.whole)

    def _say(self, peer: Any, stream: int, meta: dict[str, Any], result: dict[str, Any], body: bytes) -> None:
        if peer.wire.is_open(stream):
            common = {"call_id": meta.get("call_id"), "lens": [len(body)], "started_at": 1.0, "duration_s": 0.25, "cpu_s": 0.1, "max_rss_bytes": 4096}
            peer.wire.send_item(stream, {**common, "truncated": False, "tool_ok": False, "metadata": {}, **result}, body)

    # The rest.

    def _about_calls_or_files(self, peer: Any, stream: int, exchange: _OpenStream) -> None:
        op = exchange.meta["op"]
        if op in ("cancel", "call_status", "attach", "output"):
            self._about_call(peer, stream, exchange.meta)
        elif op in ("file_get", "file_put", "file_list", "archive_get", "archive_put"):
            self._file(peer, stream, exchange)
        elif op == "recording" and exchange.meta["name"] == RECORDING_NAME:
            peer.wire.send_item(stream, {"size_bytes": len(RECORDING)})
            peer.wire.send_data(stream, RECORDING)
            peer.wire.end(stream)
        elif op == "recording":
            peer.wire.abort(stream, {"code": "file_not_found", "detail": "the lease has no such recording"})
        else:
            peer.wire.abort(stream, {"code": "not_implemented", "detail": f"a scripted agent has no {op}"})

    def _about_call(self, peer: Any, stream: int, meta: dict[str, Any]) -> None:
        call = self.calls.get((meta["slot"], meta["epoch"], meta["call_id"]))
        if call is None:
            if meta["op"] == "cancel":
                peer.wire.end(stream, {"found": False})
            else:
                peer.wire.abort(stream, {"code": "call_not_found", "detail": "no such call"})
            return
        if meta["op"] == "cancel":
            state = "done" if call.result is not None else "running"
            peer.wire.end(stream, {"found": True, "state": state})
            if call.result is None:
                self._finish(call, {"reason": "cancelled", "exit_code": None, "error": "cancelled by the caller"}, b"")
        elif meta["op"] == "attach":
            self._attach(peer, stream, meta, call)
        elif meta["op"] == "output":
            self._output(peer, stream, meta, call)
        elif call.result is not None:
            self._say(peer, stream, meta, call.result, call.body)
            peer.wire.end(stream, {"state": "done"})
        else:
            peer.wire.end(stream, {"state": "running", "output_bytes": len(call.whole), "started_at": 1.0})

    def _attach(self, peer: Any, stream: int, meta: dict[str, Any], call: _Call) -> None:
        at = meta["offset"]

        def follow() -> None:
            nonlocal at
            if not peer.wire.is_open(stream):
                return
            if len(call.whole) > at:
                peer.wire.send_data(stream, call.whole[at:])
                at = len(call.whole)
            if call.result is not None:
                self._say(peer, stream, meta, call.result, call.body)
                peer.wire.end(stream)
            peer.flush()

        call.followers.append(follow)
        follow()

    def _output(self, peer: Any, stream: int, meta: dict[str, Any], call: _Call) -> None:
        kept = b"" if call.is_evicted else call.whole
        state = "running" if call.result is None else "done"
        peer.wire.send_item(stream, {"state": state, "total_bytes": len(call.whole), "available_bytes": len(kept)})
        if kept[meta["offset"] :]:
            peer.wire.send_data(stream, kept[meta["offset"] :])
        peer.wire.end(stream, {"total_bytes": len(call.whole), "from": meta["offset"]})

    def _serve_port(self, peer: Any, stream: int, exchange: _OpenStream) -> None:
        """Answer one HTTP request. Nothing listens on port 1."""
        if exchange.meta["port"] == 1:
            del self._exchanges[id(peer), stream]
            peer.wire.abort(stream, {"code": "port_closed", "detail": "nothing listens on port 1 of the slot", "errno": "ECONNREFUSED"})
            return
        if not exchange.connected:
            exchange.connected = True
            peer.wire.send_item(stream, {"connected": True})
        if b"\r\n\r\n" in exchange.body:
            del self._exchanges[id(peer), stream]
            peer.wire.send_data(stream, b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 3\r\n\r\nhi\n")
            peer.wire.end(stream)

    def _file(self, peer: Any, stream: int, exchange: _OpenStream) -> None:
        meta = exchange.meta
        key = (meta["slot"], meta["path"])
        if meta["path"].startswith(".."):
            peer.wire.abort(stream, {"code": "path_outside", "detail": f"{meta['path']} leads out"})
        elif meta["path"] == "fifo":
            peer.wire.abort(stream, {"code": "file_error", "detail": "fifo is a FIFO", "errno": "EINVAL"})
        elif meta["op"] == "archive_put" and self.failing_archive_count:
            self.failing_archive_count -= 1
            peer.wire.abort(stream, {"code": "internal", "detail": "the archive could not be unpacked"})
        elif meta["op"].endswith("_put"):
            self.files[key] = bytes(exchange.body)
            peer.wire.end(stream, {})
        elif meta["op"] == "file_list":
            entries = [
                {"path": path, "type": "file", "size_bytes": len(content), "mode": 0o644, "mtime": 1.0}
                for (slot, path), content in self.files.items()
                if slot == meta["slot"]
            ]
            peer.wire.send_item(stream, {"entries": entries})
            peer.wire.end(stream)
        elif key in self.files:
            peer.wire.send_data(stream, self.files[key])
            peer.wire.end(stream, {"size_bytes": len(self.files[key])})
        else:
            peer.wire.abort(stream, {"code": "file_not_found", "detail": f"there is no {meta['path']}"})


class ScriptedBackend(FakeBackend):
    """A backend whose sandboxes run scripted agents."""

    def make_agent(self, pool: str, spec: PoolSpec, sandbox_id: str) -> ScriptedAgent:
        return ScriptedAgent(sandbox_id, slots=spec.slots_per_sandbox)

    def agent(self) -> ScriptedAgent:
        """The only agent."""
        (agent,) = self.agents.values()
        assert isinstance(agent, ScriptedAgent)
        return agent
