"""Frames between the service and one agent: bytes in, events out, no I/O.

One connection carries many streams. Every frame is `length, kind, stream` (network order) and a payload.
The opener of a stream sends OPEN, then ITEM and DATA frames, then END; the other side answers on the same stream the same way.
ITEM is one message (a JSON object and raw bytes beside it), cut into ITEM_PART frames where it is long; DATA is a raw byte stream.
Both consume credit: a sender may have at most `WINDOW_BYTES` unacknowledged on a stream, a receiver gives credit back as it consumes.
ABORT ends a stream at once in both directions and says why. PING is answered with PONG.

This is the one file that the service and the agent share: standard library only, the syntax of Python 3.8.
"""

import json
import struct
from collections import deque
from typing import Any, Deque, Dict, List, NamedTuple, Tuple, Union

PROTOCOL_VERSION = 1
HEADER = struct.Struct(">IBI")
ITEM_HEAD = struct.Struct(">I")

HELLO, OPEN, DATA, ITEM, ITEM_PART, CREDIT, END, ABORT, PING, PONG = range(1, 11)
KINDS = frozenset(range(1, 11))

MAX_FRAME_BYTES = 1 << 20
PART_BYTES = 64 << 10
WINDOW_BYTES = 256 << 10
MAX_ITEM_BYTES = 32 << 20
MAX_STREAMS = 20_000


class WireError(Exception):
    """The other side broke the protocol; the connection cannot go on."""


class Hello(NamedTuple):
    """The first frame of either side."""

    meta: Dict[str, Any]


class Opened(NamedTuple):
    """The other side opened a stream."""

    stream: int
    meta: Dict[str, Any]


class Item(NamedTuple):
    """One whole message; `size` is the credit to give back once it is consumed."""

    stream: int
    meta: Dict[str, Any]
    body: bytes
    size: int


class Data(NamedTuple):
    """Raw bytes; `size` is the credit to give back once they are consumed."""

    stream: int
    body: bytes
    size: int


class Ended(NamedTuple):
    """The other side has said all it will say on this stream."""

    stream: int
    meta: Dict[str, Any]


class Aborted(NamedTuple):
    """The stream is over, in both directions."""

    stream: int
    meta: Dict[str, Any]


class Drained(NamedTuple):
    """What this side queued on the stream has all been handed to the transport."""

    stream: int


class Pong(NamedTuple):
    """The answer to a ping."""


Event = Union[Hello, Opened, Item, Data, Ended, Aborted, Drained, Pong]


_encode = json.JSONEncoder(separators=(",", ":")).encode


def _dump(meta: Dict[str, Any]) -> bytes:
    return _encode(meta).encode()


def cost(payload: bytes) -> int:
    """The credit that a frame of content takes: its header counts, or empty frames would be free."""
    return HEADER.size + len(payload)


def _load(payload: bytes) -> Dict[str, Any]:
    try:
        meta = json.loads(payload) if payload else {}
    except (ValueError, RecursionError) as error:
        raise WireError(f"a frame holds no JSON: {error}") from None
    if not isinstance(meta, dict):
        raise WireError("a frame holds JSON that is not an object")
    return meta


def frame(kind: int, stream: int, payload: bytes = b"") -> bytes:
    """One encoded frame."""
    return HEADER.pack(len(payload), kind, stream) + payload


def pack_item(meta: Dict[str, Any], body: bytes = b"") -> bytes:
    """The payload of an ITEM: the length of the JSON, the JSON, the raw bytes."""
    head = _dump(meta)
    return ITEM_HEAD.pack(len(head)) + head + body


def unpack_item(payload: bytes) -> Tuple[Dict[str, Any], bytes]:
    """The other way round.

    Raises:
        WireError: the payload is shorter than it says, or holds no JSON object.
    """
    if len(payload) < ITEM_HEAD.size:
        raise WireError(f"an item of {len(payload)} bytes is too short")
    (length,) = ITEM_HEAD.unpack_from(payload)
    end = ITEM_HEAD.size + length
    if end > len(payload):
        raise WireError(f"an item says {length} bytes of JSON and has {len(payload) - ITEM_HEAD.size}")
    return _load(payload[ITEM_HEAD.size : end]), payload[end:]


class _Stream:
    __slots__ = ("closed_here", "closed_there", "credit", "held", "owed", "parts", "parts_bytes", "queue", "queued", "received", "unread")

    def __init__(self) -> None:
        self.queue: Deque[Tuple[int, bytes]] = deque()
        self.queued = 0  # the cost of what waits in the queue
        self.credit = WINDOW_BYTES
        self.received = 0  # bytes the other side sent and this side has not yet acknowledged
        self.owed = 0  # acknowledged here, not yet announced there
        self.unread = 0  # items and data handed out here and not yet acknowledged
        self.held = 0  # the cost of parts whose credit waits until everything before them is read
        self.parts: List[bytes] = []
        self.parts_bytes = 0
        self.closed_here = False
        self.closed_there = False


class Connection:
    """The state of one connection. Feed it what arrives, send what `data_to_send` gives.

    Args:
        opens_odd: whether the streams this side opens have odd numbers (the service's do, the agent opens none).
    """

    def __init__(self, opens_odd: bool) -> None:
        self._streams: Dict[int, _Stream] = {}
        self._out: List[bytes] = []
        self._buffer = bytearray()
        self._drained: List[int] = []
        self._pong_due = False
        self._next = 1 if opens_odd else 2
        self._parity = self._next % 2
        self._said_hello = False
        self._heard_hello = False

    # What this side says.

    def hello(self, meta: Dict[str, Any]) -> None:
        """Say who this is; must come before anything else."""
        self._said_hello = True
        self._out.append(frame(HELLO, 0, _dump(meta)))

    def open(self, meta: Dict[str, Any]) -> int:
        """Open a stream and return its number."""
        stream = self._next
        self._next += 2
        self._streams[stream] = _Stream()
        self._out.append(frame(OPEN, stream, _dump(meta)))
        return stream

    def send_item(self, stream: int, meta: Dict[str, Any], body: bytes = b"") -> None:
        """Queue one message."""
        payload = pack_item(meta, body)
        state = self._streams[stream]
        if not state.queue and len(payload) <= PART_BYTES and cost(payload) <= state.credit:
            state.credit -= cost(payload)
            self._out.append(frame(ITEM, stream, payload))
            return
        for start in range(0, len(payload), PART_BYTES):
            part = payload[start : start + PART_BYTES]
            state.queue.append((ITEM if start + PART_BYTES >= len(payload) else ITEM_PART, part))
            state.queued += cost(part)
        self._pump(stream, state)

    def send_data(self, stream: int, body: bytes) -> None:
        """Queue raw bytes."""
        state = self._streams[stream]
        for start in range(0, len(body), PART_BYTES):
            part = body[start : start + PART_BYTES]
            state.queue.append((DATA, part))
            state.queued += cost(part)
        self._pump(stream, state)

    def end(self, stream: int, meta: Union[Dict[str, Any], None] = None) -> None:
        """Say that nothing more comes from this side on this stream."""
        state = self._streams[stream]
        payload = _dump(meta) if meta else b""
        if state.queue:
            state.queue.append((END, payload))
        else:
            self._close_here(stream, state, payload)

    def abort(self, stream: int, meta: Dict[str, Any]) -> None:
        """End the stream in both directions, dropping what is queued. Does nothing on a stream that is over."""
        if self._streams.pop(stream, None) is not None:
            self._out.append(frame(ABORT, stream, _dump(meta)))

    def acknowledge(self, stream: int, size: int) -> None:
        """Give back the credit of one item or piece of data that was consumed: its `size`."""
        state = self._streams.get(stream)
        if state is None or state.closed_there:
            return
        state.unread -= 1
        if not state.unread:
            size += state.held
            state.held = 0
        self._give_back(stream, state, size)

    def _give_back(self, stream: int, state: _Stream, size: int) -> None:
        state.received -= size
        state.owed += size
        if state.owed >= WINDOW_BYTES // 4:
            self._out.append(frame(CREDIT, stream, ITEM_HEAD.pack(state.owed)))
            state.owed = 0

    def ping(self) -> None:
        """Ask whether the other side is there."""
        self._out.append(frame(PING, 0))

    def is_open(self, stream: int) -> bool:
        """Whether this side may still send on the stream."""
        state = self._streams.get(stream)
        return state is not None and not state.closed_here

    def is_over(self, stream: int) -> bool:
        """Whether nothing more comes or goes on the stream; it is forgotten here."""
        return stream not in self._streams

    def queued(self, stream: int) -> int:
        """How much waits on this stream for credit, in bytes of frames."""
        state = self._streams.get(stream)
        return state.queued if state is not None else 0

    def data_to_send(self) -> bytes:
        """Everything there is to send now; the caller sends all of it."""
        if self._pong_due:
            # One answer for any number of pings: a flood of them costs the other side, not this one.
            self._pong_due = False
            self._out.append(frame(PONG, 0))
        out, self._out = b"".join(self._out), []
        return out

    def has_data_to_send(self) -> bool:
        """Whether `data_to_send` would give anything."""
        return self._pong_due or bool(self._out)

    # What this side hears.

    def receive(self, data: bytes) -> List[Event]:
        """What the bytes that arrived mean.

        Raises:
            WireError: the other side broke the protocol; close the connection.
        """
        self._buffer += data
        events: List[Event] = []
        at = 0
        have = len(self._buffer)
        while have - at >= HEADER.size:
            length, kind, stream = HEADER.unpack_from(self._buffer, at)
            if length > MAX_FRAME_BYTES or kind not in KINDS:
                raise WireError(f"frame of kind {kind} with {length} bytes")
            if have - at - HEADER.size < length:
                break
            start = at + HEADER.size
            at = start + length
            self._frame(kind, stream, bytes(self._buffer[start:at]), events)
        if at:
            del self._buffer[:at]
        if self._drained:
            events.extend(Drained(stream) for stream in self._drained)
            self._drained.clear()
        return events

    def _frame(self, kind: int, stream: int, payload: bytes, events: List[Event]) -> None:
        if kind == HELLO:
            if self._heard_hello:
                raise WireError("a second HELLO")
            self._heard_hello = True
            events.append(Hello(_load(payload)))
            return
        if not self._heard_hello:
            raise WireError(f"frame of kind {kind} before HELLO")
        if kind == PING:
            self._pong_due = True
        elif kind == PONG:
            events.append(Pong())
        elif kind == OPEN:
            self._opened(stream, payload, events)
        else:
            state = self._streams.get(stream)
            if state is not None:  # else: late frames of a stream that this side has aborted
                self._on_stream(kind, stream, state, payload, events)

    def _opened(self, stream: int, payload: bytes, events: List[Event]) -> None:
        if stream % 2 == self._parity or stream == 0 or stream in self._streams:
            raise WireError(f"stream {stream} cannot be opened from there")
        if len(self._streams) >= MAX_STREAMS:
            raise WireError(f"more than {MAX_STREAMS} streams at once")
        self._streams[stream] = _Stream()
        events.append(Opened(stream, _load(payload)))

    def _on_stream(self, kind: int, stream: int, state: _Stream, payload: bytes, events: List[Event]) -> None:
        if kind == CREDIT:
            if len(payload) != ITEM_HEAD.size:
                raise WireError(f"credit of {len(payload)} bytes")
            state.credit += ITEM_HEAD.unpack(payload)[0]
            if state.credit > WINDOW_BYTES:
                raise WireError("more credit given back than was taken")
            self._pump(stream, state)
        elif kind == ABORT:
            del self._streams[stream]
            events.append(Aborted(stream, _load(payload)))
        elif state.closed_there:
            raise WireError(f"frame of kind {kind} after END")
        elif kind == END:
            state.closed_there = True
            self._forget(stream, state)
            events.append(Ended(stream, _load(payload)))
        else:
            self._content(kind, stream, state, payload, events)

    def _content(self, kind: int, stream: int, state: _Stream, payload: bytes, events: List[Event]) -> None:
        state.received += cost(payload)
        if state.received > WINDOW_BYTES:
            raise WireError(f"stream {stream} sent more than its credit")
        if kind == DATA:
            state.unread += 1
            events.append(Data(stream, payload, cost(payload)))
            return
        if kind == ITEM and not state.parts:
            meta, body = unpack_item(payload)
            state.unread += 1
            events.append(Item(stream, meta, body, cost(payload)))
            return
        state.parts.append(payload)
        state.parts_bytes += cost(payload)
        if state.parts_bytes > MAX_ITEM_BYTES:
            raise WireError(f"an item of more than {MAX_ITEM_BYTES} bytes")
        if kind == ITEM_PART:
            # Holding its own credit would stop a long item for ever. But only one may grow at a time: what is not read yet holds the credit of what follows.
            if state.unread:
                state.held += cost(payload)
            else:
                self._give_back(stream, state, cost(payload))
            return
        meta, body = unpack_item(b"".join(state.parts))
        state.parts, state.parts_bytes = [], 0
        state.unread += 1
        events.append(Item(stream, meta, body, cost(payload)))

    def _pump(self, stream: int, state: _Stream) -> None:
        waited = bool(state.queue)
        while state.queue:
            kind, payload = state.queue[0]
            if kind == END:
                state.queue.popleft()
                self._close_here(stream, state, payload)
                break
            if cost(payload) > state.credit:
                return
            state.queue.popleft()
            state.queued -= cost(payload)
            state.credit -= cost(payload)
            self._out.append(frame(kind, stream, payload))
        if waited:
            self._drained.append(stream)

    def _close_here(self, stream: int, state: _Stream, payload: bytes) -> None:
        if state.closed_here:
            return
        state.closed_here = True
        self._out.append(frame(END, stream, payload))
        self._forget(stream, state)

    def _forget(self, stream: int, state: _Stream) -> None:
        if state.closed_here and state.closed_there:
            self._streams.pop(stream, None)
