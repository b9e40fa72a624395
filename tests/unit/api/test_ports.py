"""What of a request to a port reaches the program, and where a redirect of the program may lead."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sandbox_server.api.ports.directions import run_until_first_ends
from sandbox_server.api.ports.headers import answered_headers, body_headers, forwarded_headers, own_location
from sandbox_server.api.ports.target import PortTarget, target_of
from sandbox_server.core.errors import InvalidRequest

PREFIX = b"/v1/leases/l-1/ports/8000"
TARGET = PortTarget(lease_id="l-1", port=8000, prefix=PREFIX, path=b"/a/b?q")


def scope(raw_path: bytes, lease_id: str = "l-1", port: str = "8000", **more: Any) -> dict[str, Any]:
    return {"path_params": {"lease_id": lease_id, "port": port}, "path": "/", "raw_path": raw_path, "query_string": b"", **more}


@pytest.mark.parametrize(
    ("rest", "query", "path"),
    [
        (b"", b"", b"/"), (b"/", b"", b"/"), (b"/", b"q=1", b"/?q=1"), (b"//x", b"", b"//x"), (b"/a%2Fb/%2e%2e/c%0A", b"%20&", b"/a%2Fb/%2e%2e/c%0A?%20&"),
        (b"/v1/leases/l-2/ports/9/", b"", b"/v1/leases/l-2/ports/9/"),
    ],
)  # fmt: skip
def test_the_path_of_the_program_is_what_the_client_has_sent(rest: bytes, query: bytes, path: bytes) -> None:
    assert target_of(scope(PREFIX + rest, query_string=query)) == PortTarget(lease_id="l-1", port=8000, prefix=PREFIX, path=path)


def test_the_path_in_front_of_the_service_belongs_to_the_prefix() -> None:
    target = target_of(scope(b"/pool" + PREFIX + b"/x", root_path="/pool"))

    assert (target.prefix, target.path) == (b"/pool" + PREFIX, b"/x")


@pytest.mark.parametrize("raw", [b"/v1%2Fleases/l-1/ports/8000/x", b"/v1/leases/l-1%2Fports%2F8000/x", b"/v1/leases/l-1/ports/%38000/x"])
def test_an_encoded_slash_or_digit_in_front_of_the_programs_path_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest):
        target_of(scope(raw))


@pytest.mark.parametrize("port", ["0", "65536", "08000", "+80", "８０", "", "1" * 5000])
def test_what_is_no_port_is_refused(port: str) -> None:
    with pytest.raises(InvalidRequest, match="port: must be a number from 1 to 65535"):
        target_of(scope(PREFIX, port=port))


@pytest.mark.parametrize(
    ("location", "path"),
    [
        (b"/login", b"/login"), (b"c", b"/a/c"), (b"?x", b"/a/b?x"), (b"#f", b"/a/b?q#f"), (b"../../..", b"/"), (b"http://localhost:8000/x?y", b"/x?y"),
        (b"http://127.0.0.1:8000", b"/"), (b"http://[::1]:8000/x", b"/x"), (PREFIX + b"/x", b"/x"), (b"/v1/release", b"/v1/release"),
        (b"/%2e%2e/%2E./x", b"/x"), (b"/a%2f..%2fb", b"/a%2f..%2fb"), (PREFIX, PREFIX), (PREFIX + b"/../../x", b"/v1/leases/l-1/x"),
    ],
)  # fmt: skip
def test_a_redirect_within_the_program_stays_below_its_port(location: bytes, path: bytes) -> None:
    assert own_location(location, TARGET) == PREFIX + path


@pytest.mark.parametrize(
    "location",
    [
        b"http://service/v1/release", b"//service/v1/release", b"https://localhost:8000/", b"http://localhost:8001/", b"http://localhost/",
        b"javascript:alert(1)", b"http://localhost:8000@service/", b"\\\\service\\x", b"/\\service", b"/a b", b"/\tx", "/ä".encode(), b"http://[/", b"http://LOCALHOST:8000/",
    ],
)  # fmt: skip
def test_a_redirect_that_leads_elsewhere_is_left_out(location: bytes) -> None:
    assert own_location(location, TARGET) is None
    assert b"location" not in dict(answered_headers([(b"location", location)], 302, TARGET))


def test_two_locations_are_none() -> None:
    assert b"location" not in dict(answered_headers([(b"location", b"/a"), (b"Location", b"/b")], 302, TARGET))


def test_headers_of_a_request_that_are_not_for_the_program() -> None:
    received = [
        (b"host", b"pool:80"),
        (b"authorization", b"Bearer t"),
        (b"cookie", b"a"),
        (b"connection", b"Keep-Alive, X-Hop"),
        (b"x-hop", b"1"),
        (b"te", b"trailers"),
        (b"x-forwarded-prefix", b"/forged"),
        (b"forwarded", b"for=x"),
        (b"expect", b"100-continue"),
        (b"proxy-authorization", b"x"),
        (b"upgrade", b"h2c"),
        (b"sec-websocket-key", b"k"),
        (b"content-length", b"5"),
        (b"accept", b"*/*"),
        (b"x-two", b"1"),
        (b"x-two", b"2"),
    ]

    assert forwarded_headers(received, TARGET, "https") == [
        (b"host", b"localhost:8000"),
        (b"accept", b"*/*"),
        (b"x-two", b"1"),
        (b"x-two", b"2"),
        (b"x-forwarded-proto", b"https"),
        (b"x-forwarded-prefix", PREFIX),
        (b"x-forwarded-host", b"pool:80"),
    ]


def test_the_framing_of_a_request_is_its_own() -> None:
    assert body_headers([(b"content-length", b"5")]) == [(b"content-length", b"5")]
    assert body_headers([(b"content-length", b"5"), (b"transfer-encoding", b"gzip, chunked")]) == [(b"transfer-encoding", b"chunked")]
    assert body_headers([]) == []


def test_headers_of_an_answer_that_act_beyond_it() -> None:
    sent = [
        (b"Content-Type", b"text/html"),
        (b"Set-Cookie", b"a"),
        (b"X-Accel-Redirect", b"/etc"),
        (b"Access-Control-Allow-Origin", b"*"),
        (b"Connection", b"X-Hop"),
        (b"X-Hop", b"1"),
        (b"Content-Length", b"3"),
        (b"Content-Security-Policy", b"script-src *"),
        (b"Cache-Control", b"public"),
        (b"Link", b"</v1/leases>; rel=preload"),
        (b"Content-Location", b"/v1/leases"),
        (b"ETag", b"x"),
    ]
    own = [
        (b"content-security-policy", b"sandbox"),
        (b"x-content-type-options", b"nosniff"),
        (b"referrer-policy", b"no-referrer"),
        (b"cross-origin-resource-policy", b"same-origin"),
        (b"cache-control", b"no-store"),
    ]

    assert answered_headers(sent, 200, TARGET) == [(b"Content-Type", b"text/html"), (b"Content-Length", b"3"), (b"ETag", b"x"), *own]
    assert answered_headers(sent, 304, TARGET) == [(b"Content-Type", b"text/html"), (b"ETag", b"x"), *own]
    assert answered_headers([*sent, (b"Transfer-Encoding", b"chunked")], 200, TARGET) == [(b"Content-Type", b"text/html"), (b"ETag", b"x"), *own]


async def test_what_runs_beside_ends_with_the_main_part_or_ends_it_by_failing() -> None:
    ended: list[str] = []

    async def wait_for_ever(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(name)

    async def return_at_once() -> None:
        return

    async def fail() -> None:
        raise KeyError("beside")

    await run_until_first_ends(return_at_once(), wait_for_ever("beside"))
    with pytest.raises(KeyError, match="beside"):
        await run_until_first_ends(wait_for_ever("main"), fail())
    with pytest.raises(KeyError, match="beside"):
        await run_until_first_ends(fail(), return_at_once())

    assert ended == ["beside", "main"]
