"""The frame protocol: whatever is said arrives, in order, in any cut, within its credit; nonsense ends the connection."""

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox_server.agent import wire


def pair() -> tuple[wire.Connection, wire.Connection]:
    """A service and an agent that have greeted each other."""
    service, agent = wire.Connection(opens_odd=True), wire.Connection(opens_odd=False)
    service.hello({"v": 1})
    agent.hello({"v": 1})
    assert agent.receive(service.data_to_send()) == [wire.Hello({"v": 1})]
    assert service.receive(agent.data_to_send()) == [wire.Hello({"v": 1})]
    return service, agent


def carry(service: wire.Connection, agent: wire.Connection) -> tuple[list[wire.Event], list[wire.Event]]:
    """Carry bytes both ways, consuming at once, until nobody has anything to say; what (the agent, the service) heard."""
    heard: tuple[list[wire.Event], list[wire.Event]] = ([], [])
    while service.has_data_to_send() or agent.has_data_to_send():
        for sender, receiver, events in ((service, agent, heard[0]), (agent, service, heard[1])):
            for event in receiver.receive(sender.data_to_send()):
                events.append(event)
                if isinstance(event, wire.Item | wire.Data):
                    receiver.acknowledge(event.stream, event.size)
    return heard


def test_an_exchange_arrives_whole_and_in_order() -> None:
    service, agent = pair()
    stream = service.open({"op": "calls"})
    service.send_item(stream, {"n": 1}, b"one")
    service.send_item(stream, {"n": 2}, b"")
    service.end(stream, {"bye": True})

    heard, _ = carry(service, agent)

    assert [type(event).__name__ for event in heard] == ["Opened", "Item", "Item", "Ended"]
    assert [(event.meta, event.body) for event in heard if isinstance(event, wire.Item)] == [({"n": 1}, b"one"), ({"n": 2}, b"")]
    assert not service.is_open(stream)
    assert agent.is_open(stream)


@settings(max_examples=40, deadline=None)
@given(
    messages=st.lists(
        st.one_of(st.binary(max_size=200), st.integers(0, 5).map(lambda n: bytes(n * wire.PART_BYTES + n)), st.just(b"x" * (3 * wire.WINDOW_BYTES))), max_size=8
    ),
    cut=st.sampled_from([997, 4096, 65_536, 70_000]),
)
def test_any_items_in_any_cut_arrive_as_they_were(messages: list[bytes], cut: int) -> None:
    service, agent = pair()
    stream = service.open({})
    for number, body in enumerate(messages):
        service.send_item(stream, {"n": number}, body)
    service.end(stream)
    got: list[tuple[int, bytes]] = []
    ended = False
    while service.has_data_to_send() or agent.has_data_to_send():
        sent = service.data_to_send()
        for start in range(0, len(sent), cut):
            for event in agent.receive(sent[start : start + cut]):
                if isinstance(event, wire.Item):
                    got.append((event.meta["n"], event.body))
                    agent.acknowledge(stream, event.size)
                ended = ended or isinstance(event, wire.Ended)
        service.receive(agent.data_to_send())

    assert got == list(enumerate(messages))
    assert ended


def test_one_byte_at_a_time() -> None:
    service, agent = pair()
    stream = service.open({"op": "calls"})
    service.send_item(stream, {"n": 1}, b"body")
    service.end(stream)

    heard = [event for byte in service.data_to_send() for event in agent.receive(bytes([byte]))]

    assert [type(event).__name__ for event in heard] == ["Opened", "Item", "Ended"]


def test_a_sender_stops_at_its_credit_and_goes_on_when_it_comes_back() -> None:
    service, agent = pair()
    stream = service.open({})
    service.send_data(stream, b"d" * (2 * wire.WINDOW_BYTES))

    first = [event for event in agent.receive(service.data_to_send()) if isinstance(event, wire.Data)]

    assert wire.WINDOW_BYTES - wire.PART_BYTES - wire.HEADER.size < sum(event.size for event in first) <= wire.WINDOW_BYTES
    assert service.queued(stream) >= 2 * wire.WINDOW_BYTES - sum(len(event.body) for event in first)
    heard, back = carry_from(service, agent, first)
    assert sum(len(event.body) for event in heard if isinstance(event, wire.Data)) == service_total(first)
    assert wire.Drained(stream) in back


def service_total(first: list[wire.Data]) -> int:
    return 2 * wire.WINDOW_BYTES - sum(len(event.body) for event in first)


def carry_from(service: wire.Connection, agent: wire.Connection, unread: list[wire.Data]) -> tuple[list[wire.Event], list[wire.Event]]:
    """Consume what was received before, then carry on as `carry` does."""
    for event in unread:
        agent.acknowledge(event.stream, event.size)
    return carry(service, agent)


def test_empty_frames_are_not_free() -> None:
    agent = wire.Connection(opens_odd=False)
    agent.receive(hello() + wire.frame(wire.OPEN, 1))

    with pytest.raises(wire.WireError, match="more than its credit"):
        agent.receive(wire.frame(wire.DATA, 1) * (wire.WINDOW_BYTES // wire.HEADER.size + 1))


def test_long_items_that_nobody_reads_do_not_pile_up() -> None:
    service, agent = pair()
    stream = service.open({})
    for number in range(5):
        service.send_item(stream, {"n": number}, bytes(4 * wire.WINDOW_BYTES))
    unread: list[wire.Item] = []
    while service.has_data_to_send() or agent.has_data_to_send():
        unread += [event for event in agent.receive(service.data_to_send()) if isinstance(event, wire.Item)]
        service.receive(agent.data_to_send())

    assert [event.meta["n"] for event in unread] == [0]
    assert service.queued(stream) > 3 * 4 * wire.WINDOW_BYTES
    agent.acknowledge(stream, unread[0].size)
    heard, _ = carry(service, agent)
    assert [event.meta["n"] for event in heard if isinstance(event, wire.Item)] == [1, 2, 3, 4]


def test_a_flood_of_pings_gets_one_answer() -> None:
    service, agent = pair()

    agent.receive(wire.frame(wire.PING, 0) * 10_000)

    assert service.receive(agent.data_to_send()) == [wire.Pong()]
    assert not agent.has_data_to_send()


def test_an_abort_ends_both_directions_and_late_frames_are_ignored() -> None:
    service, agent = pair()
    stream = service.open({})
    carry(service, agent)
    agent.send_item(stream, {"late": 1})
    service.abort(stream, {"code": "cancelled"})

    heard, late = carry(service, agent)

    assert heard == [wire.Aborted(stream, {"code": "cancelled"})]
    assert late == []


def hello() -> bytes:
    return wire.frame(wire.HELLO, 0, b"{}")


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        (wire.frame(wire.OPEN, 1, b"{}"), "before HELLO"),
        (hello() + hello(), "second HELLO"),
        (wire.HEADER.pack(wire.MAX_FRAME_BYTES + 1, wire.DATA, 1), "frame of kind"),
        (wire.HEADER.pack(0, 99, 1), "frame of kind 99"),
        (hello() + wire.frame(wire.OPEN, 2, b"{}"), "cannot be opened"),
        (hello() + wire.frame(wire.OPEN, 1, b"{}") * 2, "cannot be opened"),
        (hello() + wire.frame(wire.OPEN, 1, b"not json"), "no JSON"),
        (hello() + wire.frame(wire.OPEN, 1, b"[1]"), "not an object"),
        (hello() + wire.frame(wire.OPEN, 1, b"[" * 100_000), "no JSON"),
        (hello() + wire.frame(wire.OPEN, 1) + wire.frame(wire.ITEM, 1, b"xx"), "too short"),
        (hello() + wire.frame(wire.OPEN, 1) + wire.frame(wire.ITEM, 1, b"\xff\xff\xff\xff{}"), "bytes of JSON"),
        (hello() + wire.frame(wire.OPEN, 1) + wire.frame(wire.END, 1) + wire.frame(wire.DATA, 1, b"x"), "after END"),
        (hello() + wire.frame(wire.OPEN, 1) + wire.frame(wire.DATA, 1, bytes(wire.WINDOW_BYTES + 1)), "more than its credit"),
        (hello() + wire.frame(wire.OPEN, 1) + wire.frame(wire.CREDIT, 1, wire.ITEM_HEAD.pack(1)), "more credit"),
        (hello() + wire.frame(wire.OPEN, 1) + wire.frame(wire.CREDIT, 1, b"x"), "credit of 1 bytes"),
    ],
)
def test_nonsense_is_refused(said: bytes, complaint: str) -> None:
    agent = wire.Connection(opens_odd=False)

    with pytest.raises(wire.WireError, match=complaint):
        agent.receive(said)


def test_an_item_without_end_is_bounded() -> None:
    agent = wire.Connection(opens_odd=False)
    agent.receive(hello() + wire.frame(wire.OPEN, 1))
    part = wire.frame(wire.ITEM_PART, 1, bytes(wire.PART_BYTES))
    for _ in range(wire.MAX_ITEM_BYTES // wire.cost(bytes(wire.PART_BYTES))):
        agent.receive(part)

    with pytest.raises(wire.WireError, match="an item of more than"):
        agent.receive(part)


@given(st.binary(max_size=300))
def test_random_bytes_never_raise_anything_else(said: bytes) -> None:
    agent = wire.Connection(opens_odd=False)
    heard: list[wire.Event] = []
    with contextlib.suppress(wire.WireError):
        heard = agent.receive(hello() + said)
    assert all(isinstance(event, wire.Event) for event in heard)


def test_a_ping_is_answered() -> None:
    service, agent = pair()
    service.ping()

    assert agent.receive(service.data_to_send()) == []
    assert service.receive(agent.data_to_send()) == [wire.Pong()]


def test_items_hold_json_and_bytes_side_by_side() -> None:
    payload = wire.pack_item({"a": "ä"}, b"\x00\xff")

    assert wire.unpack_item(payload) == ({"a": "ä"}, b"\x00\xff")
    assert json.loads(payload[4:-2]) == {"a": "ä"}
