"""WebSocket to a server in a slot, through the service: messages, closes, pings, and the end of the lease."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Subprotocol

from tests.integration.ports.conftest import PORT, ServedSlot


def websocket(slot: ServedSlot, path: str, **options: object) -> ClientConnection:
    """Open a WebSocket to the port of a slot."""
    return connect(slot.ws_url + path, additional_headers=slot.service.headers, proxy=None, max_size=None, **options)  # type: ignore[arg-type]


def close_of(connection: ClientConnection) -> tuple[int, str]:
    """Wait until the connection is closed from the other side, and return the code and the reason."""
    with pytest.raises(ConnectionClosed) as closed:
        connection.recv(30)
    assert closed.value.rcvd is not None
    return closed.value.rcvd.code, closed.value.rcvd.reason


def test_messages_go_both_ways_and_the_close_reaches_the_program(served: ServedSlot) -> None:
    with websocket(served, "/a%2Fb?q/echo") as connection:
        for message in ("text äöü", b"\x00\xff bytes", "", b"x" * (1 << 20)):
            connection.send(message)
            assert connection.recv(30) == message
        connection.ping().wait(30)
        connection.close(4123, "enough")

    assert served.wait_for_file("closed") == "4123enough"


def test_messages_go_both_ways_at_once(served: ServedSlot) -> None:
    messages = [b"%d" % number + bytes(1 << 20) for number in range(32)]
    with websocket(served, "/echo") as connection, ThreadPoolExecutor(1) as thread:
        sending = thread.submit(lambda: [connection.send(message) for message in messages])
        assert [connection.recv(30) for _ in messages] == messages
        sending.result(30)


def test_a_message_in_very_many_fragments_arrives_whole(served: ServedSlot) -> None:
    with websocket(served, "/splinters") as connection:
        assert connection.recv(30) == b"whole"


def test_a_client_that_gives_up_the_handshake_ends_the_connection(served: ServedSlot) -> None:
    with pytest.raises(TimeoutError):
        websocket(served, "/silent", open_timeout=0.5)

    served.wait_for_file("hung-up")


def test_a_ping_of_the_program_is_answered(served: ServedSlot) -> None:
    with websocket(served, "/ping") as connection:
        assert connection.recv(30) == "(10, b'there?')"


def test_the_handshake_carries_no_credentials_and_only_the_clients_own_subprotocols(served: ServedSlot) -> None:
    token = served.service.token
    offered = [Subprotocol(f"bearer.{token}"), Subprotocol("mine"), Subprotocol("other")]
    with connect(served.ws_url + "/head", subprotocols=offered, additional_headers={"Cookie": "a=b", "X-Own": "1"}, proxy=None) as connection:
        head = str(connection.recv(30))
        chosen = connection.subprotocol

    assert connection.response is not None
    assert (chosen, "Set-Cookie" in connection.response.headers) == ("mine", False)
    assert token not in head
    assert "cookie" not in head
    assert "'sec-websocket-protocol': 'mine, other'" in head
    assert f"'host': 'localhost:{PORT}'" in head
    assert f"'x-forwarded-prefix': '{served.path}'" in head
    assert "'x-own': '1'" in head


def test_the_program_closes(served: ServedSlot) -> None:
    with websocket(served, "/close") as connection:
        assert close_of(connection) == (4001, "bye")


@pytest.mark.parametrize(("path", "why"), [("/vanish", "has ended the connection without closing it"), ("/large", "has broken the protocol")])
def test_a_program_that_breaks_the_connection_or_the_protocol_closes_it_with_4502(served: ServedSlot, path: str, why: str) -> None:
    with websocket(served, path) as connection:
        code, reason = close_of(connection)

    assert code == 4502
    assert why in reason


@pytest.mark.parametrize(
    ("path", "why"), [("/plain", "it answered the handshake with HTTP 200"), ("/not-http", "has not accepted the WebSocket"), ("/nothing", "has not accepted")]
)
def test_a_handshake_that_the_program_does_not_accept_is_a_502(served: ServedSlot, path: str, why: str) -> None:
    with pytest.raises(InvalidStatus) as refused:
        websocket(served, path).close()

    assert refused.value.response.status_code == 502
    assert why in refused.value.response.body.decode()


def test_nobody_listens(slot: ServedSlot) -> None:
    with pytest.raises(InvalidStatus) as refused:
        websocket(slot, "/echo").close()

    assert refused.value.response.status_code == 502
    assert "port_closed" in refused.value.response.body.decode()


def _release(slot: ServedSlot) -> None:
    slot.release()


def _narrow(slot: ServedSlot) -> None:
    slot.http.post(f"/v1/leases/{slot.lease_id}/narrow", json={"read_only": ["slot_server.py"]}).raise_for_status()


@pytest.mark.parametrize(("end", "code"), [(_release, 4410), (_narrow, 4502)], ids=["release", "narrow"])
def test_the_connection_ends_with_the_processes_of_the_slot(slot: ServedSlot, end: Callable[[ServedSlot], None], code: int) -> None:
    lease_id = slot.http.post("/v1/acquire", json={"allow_network": False}).json()["leases"][0]["lease_id"]
    other = ServedSlot(service=slot.service, http=slot.http, lease_id=lease_id)
    other.start_server()
    with websocket(other, "/echo") as connection:
        connection.send("hello")
        assert connection.recv(30) == "hello"
        end(other)
        assert close_of(connection)[0] == code
    other.release()


def test_an_ended_lease_closes_with_4410(slot: ServedSlot) -> None:
    slot.release()
    with websocket(slot, "/echo") as connection:
        assert close_of(connection)[0] == 4410
