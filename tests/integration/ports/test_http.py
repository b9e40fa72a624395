"""HTTP to a server in a slot, through the service: what passes, what does not, and the pace."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from tests.integration.ports.conftest import PORT, ServedSlot, held_slot
from tests.support.service import SMALL_POOL, running_service

BIG_BYTES = 64 << 20
MAY_GROW_BYTES = 24 << 20
UNTIL_BLOCKED = "until test -s sent && seen=$(cat sent) && sleep 0.3 && test $(cat sent) = $seen; do sleep 0.1; done; cat sent"
"""A shell command that waits until the program that answers without an end can send no more, and writes how many blocks it has sent."""


def test_a_request_reaches_the_program_as_it_was_sent_but_for_credentials(served: ServedSlot) -> None:
    connection = http.client.HTTPConnection(*served.service.url.removeprefix("http://").split(":"))
    headers = {
        **served.service.headers, "Cookie": "a=b", "X-Own": "1", "Connection": "X-Hop", "X-Hop": "1", "X-Forwarded-For": "10.0.0.1", "Proxy-Authorization": "x",
    }  # fmt: skip
    connection.request("POST", f"{served.path}/a%2Fb/%2e%2e//c%0A?q=%20&r", body=b"the body", headers=headers)
    answer = connection.getresponse()
    head, _, body = answer.read().decode().partition("\r\n\r\n")
    connection.close()

    first, *lines = head.split("\r\n")
    sent = dict(line.split(": ", 1) for line in lines)
    assert (answer.status, first, body) == (200, "POST /a%2Fb/%2e%2e//c%0A?q=%20&r HTTP/1.1", "the body")
    assert sent == {
        "host": f"localhost:{PORT}", "accept-encoding": "identity", "x-own": "1", "x-forwarded-proto": "http", "x-forwarded-prefix": served.path,
        "x-forwarded-host": served.service.url.removeprefix("http://"), "content-length": "8", "connection": "close",
    }  # fmt: skip


@pytest.mark.parametrize("method", ["DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "PROPFIND", "PUT"])
def test_a_method_passes(served: ServedSlot, method: str) -> None:
    answer = served.http.request(method, served.path + "/x")

    assert answer.status_code == 200
    assert answer.text.startswith("" if method == "HEAD" else f"{method} /x HTTP/1.1")


def test_methods_and_ports_that_are_none_are_refused(slot: ServedSlot) -> None:
    assert slot.http.request("TRACE", slot.path + "/").status_code == 405
    for port in ("0", "65536", "08000", "http", "-1"):
        answer = slot.http.get(f"/v1/leases/{slot.lease_id}/ports/{port}/")
        assert (answer.status_code, answer.json()["field"]) == (422, "port"), port


def test_nobody_listens_and_no_such_lease(slot: ServedSlot) -> None:
    closed = slot.http.get(slot.path + "/")
    unknown = slot.http.get(f"/v1/leases/nobody/ports/{PORT}/")
    anonymous = httpx.get(slot.service.url + slot.path, trust_env=False)

    assert (closed.status_code, closed.json()["code"], closed.json()["detail"]) == (502, "port_closed", f"nothing listens on port {PORT} of the slot")
    assert (unknown.status_code, unknown.json()["code"]) == (404, "lease_not_found")
    assert (anonymous.status_code, anonymous.json()["code"]) == (401, "unauthorized")


def test_a_slot_that_shares_the_network_is_refused(slot: ServedSlot) -> None:
    lease_id = slot.http.post("/v1/acquire", json={}).json()["leases"][0]["lease_id"]
    answer = slot.http.get(f"/v1/leases/{lease_id}/ports/{PORT}/")
    slot.http.post("/v1/release", json={"lease_ids": [lease_id]})

    assert (answer.status_code, answer.json()["code"]) == (501, "not_implemented")
    assert "shares the network" in answer.json()["detail"]


INTERNET_POOL = {**SMALL_POOL, "slots_per_sandbox": 2, "max_sandboxes": 1, "network": "internet"}


@pytest.fixture
def internet_pool(slot: ServedSlot) -> Iterator[str]:
    """The name of a pool whose slots have networks of their own, with a way to public hosts."""
    capabilities = next(pool["capabilities"] for pool in slot.http.get("/v1/pools").json()["pools"] if pool["name"] == "default")
    if capabilities["internet"] != "ok":
        pytest.skip(f"slots cannot have networks of their own here: {capabilities['internet']}")
    slot.http.put("/v1/pools/internet", json=INTERNET_POOL).raise_for_status()
    yield "internet"
    slot.http.delete("/v1/pools/internet").raise_for_status()


def test_a_server_in_a_slot_with_the_internet_is_found_and_those_of_other_slots_are_not(slot: ServedSlot, internet_pool: str) -> None:
    with held_slot(slot.service, pool=internet_pool) as served, held_slot(slot.service, pool=internet_pool) as other:
        served.start_server()
        found, closed = served.http.get(served.path + "/x"), other.http.get(other.path + "/x")

    assert (found.status_code, found.text.partition("\r\n")[0]) == (200, "GET /x HTTP/1.1")
    assert (closed.status_code, closed.json()["code"]) == (502, "port_closed")


def test_a_server_on_the_ipv6_loopback_is_found(slot: ServedSlot) -> None:
    slot.start_server(address="::1")

    assert slot.http.get(slot.path + "/six").text.startswith("GET /six HTTP/1.1")


def test_events_come_as_they_are_sent(served: ServedSlot) -> None:
    with served.http.stream("GET", served.path + "/events") as answer:
        lines = answer.iter_lines()
        first = next(lines)
        served.http.put(f"/v1/leases/{served.lease_id}/files", params={"path": "go"}, content=b"").raise_for_status()
        rest = [line for line in lines if line]

    assert (first, rest) == ("data: first", ["data: second"])


def test_much_goes_both_ways_at_once_and_the_services_memory_stays_flat(served: ServedSlot) -> None:
    process = psutil.Process(served.service.process.pid)
    served.http.post(served.path + "/warm", content=bytes(1 << 20))
    before = most = process.memory_info().rss
    host, _, port = served.service.url.removeprefix("http://").partition(":")
    head = f"POST {served.path}/big HTTP/1.1\r\nHost: x\r\nAuthorization: {served.service.headers['Authorization']}\r\nContent-Length: {BIG_BYTES}\r\n\r\n"

    def send(sock: socket.socket) -> None:
        sock.sendall(head.encode())
        for _ in range(BIG_BYTES >> 20):
            sock.sendall(bytes(1 << 20))

    # The program echoes each part at once. If the service read no answer before it has sent the request, both would wait for each other.
    received_bytes = 0
    with socket.create_connection((host, int(port)), 60) as sock, ThreadPoolExecutor(1) as thread:
        sending = thread.submit(send, sock)
        while received_bytes < BIG_BYTES and (part := sock.recv(1 << 20)):
            received_bytes += len(part)
            most = max(most, process.memory_info().rss)
        sending.result(60)

    assert received_bytes >= BIG_BYTES
    assert most - before < MAY_GROW_BYTES


def test_a_program_whose_answer_is_not_read_waits_and_loses_its_connection_with_the_client(served: ServedSlot) -> None:
    process = psutil.Process(served.service.process.pid)
    before = process.memory_info().rss
    with served.http.stream("GET", served.path + "/endless") as answer:
        assert next(answer.iter_raw())
        sent_blocks = int(served.bash(UNTIL_BLOCKED))
        grown_bytes = process.memory_info().rss - before
    served.wait_for_file("hung-up")

    assert sent_blocks * 64 << 10 < BIG_BYTES
    assert grown_bytes < MAY_GROW_BYTES


def test_a_client_that_hangs_up_while_the_program_is_silent_ends_the_connection(served: ServedSlot) -> None:
    with pytest.raises(httpx.ReadTimeout):
        served.http.get(served.path + "/silent", timeout=httpx.Timeout(30, read=0.5))

    served.wait_for_file("hung-up")


def test_the_end_of_the_lease_ends_a_response(slot: ServedSlot) -> None:
    lease_id = slot.http.post("/v1/acquire", json={"allow_network": False}).json()["leases"][0]["lease_id"]
    other = ServedSlot(service=slot.service, http=slot.http, lease_id=lease_id)
    other.start_server()
    with other.http.stream("GET", other.path + "/events") as answer:
        lines = answer.iter_lines()
        assert next(lines) == "data: first"
        other.release()
        with pytest.raises(httpx.RemoteProtocolError):
            list(lines)

    answered = other.http.get(other.path + "/events")
    assert (answered.status_code, answered.json()["code"]) == (410, "lease_lost")


def test_an_early_answer_arrives_although_the_body_is_not_read(served: ServedSlot) -> None:
    answer = served.http.post(served.path + "/refusing", content=bytes(8 << 20))

    assert (answer.status_code, answer.text) == (413, "big")


def test_a_program_that_does_not_read_its_request_loses_the_connection() -> None:
    with running_service({"pools": {"default": {**SMALL_POOL, "max_sandboxes": 1}}, "limits": {"answer_stall_s": 1}}) as service, held_slot(service) as slot:
        slot.start_server()
        host, _, port = service.url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), 60) as sock, ThreadPoolExecutor(1) as thread:
            sock.sendall(f"POST {slot.path}/deaf HTTP/1.1\r\nHost: x\r\nAuthorization: {service.headers['Authorization']}\r\n".encode())
            sock.sendall(f"Content-Length: {BIG_BYTES}\r\n\r\n".encode())
            sending = thread.submit(sock.sendall, bytes(BIG_BYTES))
            answer = sock.recv(1 << 20).decode()
            sock.shutdown(socket.SHUT_RDWR)
            assert isinstance(sending.exception(60), OSError)

    assert answer.startswith("HTTP/1.1 502 ")
    assert "has read nothing of what was sent to it for the 1 s of `limits.answer_stall_s`" in answer


REFUSED = {
    "not-http": "valid HTTP", "nothing": "before its answer was complete", "two-lengths": "valid HTTP", "bad-name": "valid HTTP", "bare-cr": "valid HTTP",
    "giant-header": "valid HTTP", "many-headers": "valid HTTP", "interim-flood": "more than 16 interim answers", "upgraded": "valid HTTP",
    "odd-status": "its status is 777",
}  # fmt: skip


def test_an_answer_that_is_not_valid_http_is_a_502_with_a_sentence(served: ServedSlot) -> None:
    for name, why in REFUSED.items():
        answer = served.http.get(f"{served.path}/{name}")
        assert (answer.status_code, answer.json()["code"]) == (502, "port_closed"), (name, answer.text)
        assert why in answer.json()["detail"], (name, answer.text)
        assert len(answer.json()["detail"]) < 300, name


def test_an_answer_that_breaks_off_is_cut_off(served: ServedSlot) -> None:
    for name in ("half", "bad-chunk"):
        with pytest.raises(httpx.RemoteProtocolError):
            served.http.get(f"{served.path}/{name}")


def test_odd_answers_that_are_valid_arrive(served: ServedSlot) -> None:
    for name in ("second-answer", "interim", "until-end", "chunked", "chunked-and-length", "line-fold"):
        answer = served.http.get(f"{served.path}/{name}")
        assert (answer.status_code, answer.text) == (200, "ok"), name
    assert served.http.get(served.path + "/splinters").text == "x" * 50_000
    assert "x-trailer" not in served.http.get(served.path + "/chunked").headers
    not_modified = served.http.get(served.path + "/not-modified")
    assert (not_modified.status_code, not_modified.headers["etag"]) == (304, "x")


def test_headers_that_act_on_the_origin_of_the_service_do_not_arrive(served: ServedSlot) -> None:
    answer = served.http.get(served.path + "/headers")

    del answer.headers["date"], answer.headers["server"], answer.headers["x-request-id"]
    assert sorted(answer.headers.multi_items()) == [
        ("cache-control", "no-store"), ("content-length", "2"), ("content-security-policy", "sandbox"), ("content-type", "text/html"),
        ("cross-origin-resource-policy", "same-origin"), ("referrer-policy", "no-referrer"), ("x-content-type-options", "nosniff"), ("x-own", "kept"),
    ]  # fmt: skip


def test_a_redirect_stays_below_the_port(served: ServedSlot) -> None:
    assert served.http.post(served.path + "/redirect").headers["location"] == served.path + "/v1/release"


def test_requests_to_one_port_run_side_by_side(served: ServedSlot) -> None:
    with served.http.stream("GET", served.path + "/events") as first:
        assert next(first.iter_lines()) == "data: first"
        assert served.http.get(served.path + "/x").status_code == 200


def test_connections_of_a_slot_are_limited(served: ServedSlot) -> None:
    with httpx.Client(base_url=served.service.url, headers=served.service.headers, timeout=60, trust_env=False, limits=httpx.Limits()) as many:
        streams = [many.stream("GET", served.path + "/events") for _ in range(64)]
        for stream in streams:
            assert stream.__enter__().status_code == 200
        refused = served.http.get(served.path + "/x")
        for stream in streams:
            stream.__exit__(None, None, None)

    assert (refused.status_code, refused.json()["code"]) == (429, "quota_exceeded")
    assert "64 connections to ports of this slot" in refused.json()["detail"]
