"""The protocol between the service and one agent, without I/O: received bytes become events, and messages become bytes to send.

One connection carries many streams. Every frame is `length, kind, stream` in network byte order, followed by a payload.
The side that opens a stream sends OPEN, then ITEM and DATA frames, then END. The other side answers with ITEM, DATA and END on the same stream.
An item is one message: a JSON object and raw bytes. A long item is sent as several ITEM_PART frames and a last ITEM frame. DATA frames form a byte stream.
Items and data use up credit: a sender may have at most `WINDOW_BYTES` unacknowledged on a stream, and a receiver returns credit as it processes them.
ABORT ends a stream at once in both directions and gives the reason. PING is answered with PONG.

This is the only file that the service and the agent share. It uses the standard library only and the syntax of Python 3.8.
"""

import json
import struct
from collections import deque
from typing import Any, Callable, Deque, Dict, List, NamedTuple, Tuple, Union

PROTOCOL_VERSION = 1
HEADER = struct.Struct(">IBI")
ITEM_HEAD = struct.Struct(">I")
HELLO, OPEN, DATA, ITEM, ITEM_PART, CREDIT, END, ABORT, PING, PONG = range(1, 11)
KINDS = frozenset(range(1, 11))
MAX_FRAME_BYTES = 1 << 20
PART_BYTES = 64 << 10  # of an item
WINDOW_BYTES = 256 << 10
DATA_BYTES = WINDOW_BYTES // 2 - HEADER.size  # of one DATA frame: while the other side processes one, the next one is on its way
MAX_ITEM_BYTES = 32 << 20
KEPT_BYTES = 1 << 20
MAX_STREAMS = 20_000


class WireError(Exception):
    """The other side has violated the protocol. The connection must be closed."""


class Hello(NamedTuple):
    """The first frame of each side."""

    meta: Dict[str, Any]


class Opened(NamedTuple):
    """The other side has opened a stream."""

    stream: int
    meta: Dict[str, Any]


class Item(NamedTuple):
    """One complete message. `size`: the credit to return once it is processed, in bytes."""

    stream: int
    meta: Dict[str, Any]
    body: bytes
    size: int


class Data(NamedTuple):
    """Raw bytes. `size`: the credit to return once they are processed, in bytes."""

    stream: int
    body: bytes
    size: int


class Ended(NamedTuple):
    """The other side sends nothing more on this stream."""

    stream: int
    meta: Dict[str, Any]


class Aborted(NamedTuple):
    """The other side has ended the stream in both directions."""

    stream: int
    meta: Dict[str, Any]


class Drained(NamedTuple):
    """Everything that this side had queued on the stream is now among the bytes to send."""

    stream: int


class Pong(NamedTuple):
    """The answer to a ping."""


Event = Union[Hello, Opened, Item, Data, Ended, Aborted, Drained, Pong]

_encode = json.JSONEncoder(separators=(",", ":")).encode
_decode = json.JSONDecoder().decode


def encode_json(meta: Dict[str, Any]) -> bytes:
    """Encode a JSON object."""
    return _encode(meta).encode()


def cost(payload: bytes) -> int:
    """The credit that a frame with this payload uses, in bytes. The header counts, because otherwise empty frames would be free."""
    return HEADER.size + len(payload)


def _load(payload: bytes) -> Dict[str, Any]:
    try:
        meta = _decode(payload.decode("utf-8", "surrogatepass")) if payload else {}
    except (ValueError, RecursionError) as error:
        raise WireError(f"a frame holds no JSON: {error}") from None
    if not isinstance(meta, dict):
        raise WireError("a frame holds JSON that is not an object")
    return meta


def keep_freed_memory() -> None:
    """Let the C library keep freed memory for the next frames, up to `2 * KEPT_BYTES`, instead of returning it to the kernel after each of them.

    Otherwise, most of the processor time of a large transfer goes into page faults. The GNU C library adapts its thresholds when a block as large as this is
    freed for the first time; other libraries ignore it.
    """
    bytearray(KEPT_BYTES)


def frame(kind: int, stream: int, payload: bytes = b"") -> bytes:
    """Encode one frame."""
    return HEADER.pack(len(payload), kind, stream) + payload


def _unpack_header(buffer: Union[bytearray, memoryview], at: int) -> Tuple[int, int, int]:
    length, kind, stream = HEADER.unpack_from(buffer, at)
    if length > MAX_FRAME_BYTES or kind not in KINDS:
        raise WireError(f"frame of kind {kind} with {length} bytes")
    return length, kind, stream


def pack_item(meta: Dict[str, Any], body: bytes = b"", encode: Callable[[Dict[str, Any]], bytes] = encode_json) -> bytes:
    """Encode the payload of an item: the length of the JSON document, the document, the raw bytes."""
    head = encode(meta)
    return ITEM_HEAD.pack(len(head)) + head + body


def unpack_item(payload: bytes) -> Tuple[Dict[str, Any], bytes]:
    """Decode the payload of an item.

    Raises:
        WireError: the payload is shorter than the length in it, or has no JSON object.
    """
    if len(payload) < ITEM_HEAD.size:
        raise WireError(f"an item of {len(payload)} bytes is too short")
    end = ITEM_HEAD.size + ITEM_HEAD.unpack_from(payload)[0]
    if end > len(payload):
        raise WireError(f"an item says {end - ITEM_HEAD.size} bytes of JSON and has {len(payload) - ITEM_HEAD.size}")
    return _load(payload[ITEM_HEAD.size : end]), payload[end:]


class _Stream:
    """The state of one stream. `here` is this side of the connection, `there` the other one."""

    __slots__ = ("closed_here", "closed_there", "credit", "held", "owed", "parts", "parts_bytes", "queue", "queued", "received", "unread")

    def __init__(self) -> None:
        self.queue: Deque[Tuple[int, bytes]] = deque()
        self.queued = 0  # the cost of what is in the queue, in bytes
        self.credit = WINDOW_BYTES
        self.received = 0  # the cost of what this side has received and not acknowledged, in bytes
        self.owed = 0  # credit that was acknowledged and that is still to be returned with a CREDIT frame
        self.unread = 0  # how many items and pieces of data were returned as events and not acknowledged
        self.held = 0  # the cost of parts whose credit is returned once everything before them is acknowledged
        self.parts: List[bytes] = []
        self.parts_bytes = 0
        self.closed_here = self.closed_there = False

    def add_to_queue(self, kind: int, payload: bytes) -> None:
        """Queue a frame until there is credit for it."""
        self.queue.append((kind, payload))
        self.queued += cost(payload)


class Connection:
    """The state of one connection. Pass received bytes to `receive`, and send the bytes that `data_to_send` returns.

    Args:
        opens_odd: whether streams that this side opens have odd numbers. Those of the service do; the agent opens none.
        encode: encodes the JSON objects that this side sends.
    """

    def __init__(self, opens_odd: bool, encode: Callable[[Dict[str, Any]], bytes] = encode_json) -> None:
        self._encode = encode
        self._streams: Dict[int, _Stream] = {}
        self._out: List[bytes] = []
        self._buffer = bytearray()
        self._drained: List[int] = []
        self._pong_due = False
        self._next = 1 if opens_odd else 2
        self._parity = self._next % 2
        self._has_hello = False  # the other side has sent its HELLO

    def hello(self, meta: Dict[str, Any]) -> None:
        """Send the HELLO frame. It must be the first frame."""
        self._out.append(frame(HELLO, 0, self._encode(meta)))

    def open(self, meta: Dict[str, Any]) -> int:
        """Open a stream. Returns its number."""
        stream, self._next = self._next, self._next + 2
        self._streams[stream] = _Stream()
        self._out.append(frame(OPEN, stream, self._encode(meta)))
        return stream

    def send_item(self, stream: int, meta: Dict[str, Any], body: bytes = b"") -> None:
        """Queue one message."""
        payload = pack_item(meta, body, self._encode)
        state = self._streams[stream]
        if not state.queue and len(payload) <= PART_BYTES and cost(payload) <= state.credit:
            state.credit -= cost(payload)
            self._out.append(frame(ITEM, stream, payload))
            return
        for start in range(0, len(payload), PART_BYTES):
            is_last = start + PART_BYTES >= len(payload)
            state.add_to_queue(ITEM if is_last else ITEM_PART, payload[start : start + PART_BYTES])
        self._send_queue(stream, state)

    def send_data(self, stream: int, body: bytes) -> None:
        """Queue raw bytes."""
        state = self._streams[stream]
        for start in range(0, len(body), DATA_BYTES):
            state.add_to_queue(DATA, body[start : start + DATA_BYTES])
        self._send_queue(stream, state)

    def end(self, stream: int, meta: Union[Dict[str, Any], None] = None) -> None:
        """Send END once everything that is queued on the stream was sent."""
        state = self._streams[stream]
        payload = self._encode(meta) if meta else b""
        if state.queue:
            state.queue.append((END, payload))
        else:
            self._close_here(stream, state, payload)

    def abort(self, stream: int, meta: Dict[str, Any]) -> None:
        """End the stream in both directions, and discard what is queued on it. Does nothing on a stream that is over."""
        if self._streams.pop(stream, None) is not None:
            self._out.append(frame(ABORT, stream, self._encode(meta)))

    def acknowledge(self, stream: int, size: int) -> None:
        """Return the credit of one item or piece of data that was processed: its `size`."""
        state = self._streams.get(stream)
        if state is None or state.closed_there:
            return
        state.unread -= 1
        if not state.unread:
            size += state.held
            state.held = 0
        self._return_credit(stream, state, size)

    def _return_credit(self, stream: int, state: _Stream, size: int) -> None:
        state.received -= size
        state.owed += size
        if state.owed >= WINDOW_BYTES // 4:
            self._out.append(frame(CREDIT, stream, ITEM_HEAD.pack(state.owed)))
            state.owed = 0

    def ping(self) -> None:
        """Send PING. The other side answers with PONG."""
        self._out.append(frame(PING, 0))

    def is_open(self, stream: int) -> bool:
        """Whether this side may still send on the stream."""
        state = self._streams.get(stream)
        return state is not None and not state.closed_here

    def is_over(self, stream: int) -> bool:
        """Whether both sides have ended the stream, or one has aborted it."""
        return stream not in self._streams

    def queued(self, stream: int) -> int:
        """How many bytes of frames are queued on the stream because it has no credit left."""
        state = self._streams.get(stream)
        return state.queued if state is not None else 0

    def data_to_send(self) -> bytes:
        """Return all bytes that are to be sent now. The caller sends them all."""
        if self._pong_due:
            # Any number of PING frames gets one answer, so that many of them cost the other side more than this one.
            self._pong_due = False
            self._out.append(frame(PONG, 0))
        out, self._out = b"".join(self._out), []
        return out

    def has_data_to_send(self) -> bool:
        """Whether `data_to_send` would return any bytes."""
        return self._pong_due or bool(self._out)

    def receive(self, data: Union[bytes, memoryview]) -> List[Event]:
        """Decode received bytes.

        Returns:
            The events that they complete.

        Raises:
            WireError: the other side has violated the protocol.
        """
        events: List[Event] = []
        view = memoryview(data)
        if self._buffer:
            view = view[self._complete_frame(view, events) :]
        at, have = 0, len(view)
        while have - at >= HEADER.size:
            length, kind, stream = _unpack_header(view, at)
            start = at + HEADER.size
            if have - start < length:
                break
            at = start + length
            self._receive_frame(kind, stream, bytes(view[start:at]), events)
        self._buffer += view[at:]
        if self._drained:
            events.extend(Drained(stream) for stream in self._drained)
            self._drained.clear()
        return events

    def _complete_frame(self, view: memoryview, events: List[Event]) -> int:
        """Add to the frame of which only a part has arrived so far. Returns how many of the bytes belong to it."""
        taken = max(0, min(HEADER.size - len(self._buffer), len(view)))
        self._buffer += view[:taken]
        if len(self._buffer) < HEADER.size:
            return taken
        length, kind, stream = _unpack_header(self._buffer, 0)
        end = taken + HEADER.size + length - len(self._buffer)
        if end > len(view):
            self._buffer += view[taken:]
            return len(view)
        payload = b"".join((memoryview(self._buffer)[HEADER.size :], view[taken:end]))
        self._buffer.clear()
        self._receive_frame(kind, stream, payload, events)
        return end

    def _receive_frame(self, kind: int, stream: int, payload: bytes, events: List[Event]) -> None:
        if kind == HELLO:
            if self._has_hello:
                raise WireError("a second HELLO")
            self._has_hello = True
            events.append(Hello(_load(payload)))
            return
        if not self._has_hello:
            raise WireError(f"frame of kind {kind} before HELLO")
        if kind == PING:
            self._pong_due = True
        elif kind == PONG:
            events.append(Pong())
        elif kind == OPEN:
            self._receive_open(stream, payload, events)
        else:
            state = self._streams.get(stream)
            if state is not None:  # None: a late frame of a stream that this side has aborted
                self._receive_on_stream(kind, stream, state, payload, events)

    def _receive_open(self, stream: int, payload: bytes, events: List[Event]) -> None:
        if stream % 2 == self._parity or stream == 0 or stream in self._streams:
            raise WireError(f"stream {stream} cannot be opened from there")
        if len(self._streams) >= MAX_STREAMS:
            raise WireError(f"more than {MAX_STREAMS} streams at once")
        self._streams[stream] = _Stream()
        events.append(Opened(stream, _load(payload)))

    def _receive_on_stream(self, kind: int, stream: int, state: _Stream, payload: bytes, events: List[Event]) -> None:
        if kind == CREDIT:
            if len(payload) != ITEM_HEAD.size:
                raise WireError(f"credit of {len(payload)} bytes")
            state.credit += ITEM_HEAD.unpack(payload)[0]
            if state.credit > WINDOW_BYTES:
                raise WireError("more credit given back than was taken")
            self._send_queue(stream, state)
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
            self._receive_content(kind, stream, state, payload, events)

    def _receive_content(self, kind: int, stream: int, state: _Stream, payload: bytes, events: List[Event]) -> None:
        state.received += cost(payload)
        if state.received > WINDOW_BYTES:
            raise WireError(f"stream {stream} sent more than its credit")
        if kind == DATA:
            state.unread += 1
            events.append(Data(stream, payload, cost(payload)))
            return
        if kind == ITEM and not state.parts:
            events.append(Item(stream, *unpack_item(payload), cost(payload)))
            state.unread += 1
            return
        state.parts.append(payload)
        state.parts_bytes += cost(payload)
        if state.parts_bytes > MAX_ITEM_BYTES:
            raise WireError(f"an item of more than {MAX_ITEM_BYTES} bytes")
        if kind == ITEM_PART:
            # The credit of a part is returned at once, because an item may be longer than the window. But it is returned later while earlier items are unread,
            # so that only one incomplete item at a time can grow beyond the window.
            if state.unread:
                state.held += cost(payload)
            else:
                self._return_credit(stream, state, cost(payload))
            return
        events.append(Item(stream, *unpack_item(b"".join(state.parts)), cost(payload)))
        state.parts, state.parts_bytes = [], 0
        state.unread += 1

    def _send_queue(self, stream: int, state: _Stream) -> None:
        had_queue = bool(state.queue)
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
            self._out += (HEADER.pack(len(payload), kind, stream), payload)  # not joined here: `data_to_send` copies the payload anyway
        if had_queue:
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
