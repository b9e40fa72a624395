"""Which headers pass between a client and a program in a slot.

The program is hostile, and its answers have the address of the service. So its answers must not act on the service's origin as a whole, not move a client
that follows redirects to other routes of the service, and not give orders to a reverse proxy in front of the service. And the client's token and cookies
must not reach the program.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import urljoin, urlsplit

from sandbox_server.api.ports.target import PortTarget

Headers = list[tuple[bytes, bytes]]

HOP_BY_HOP = frozenset({b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade"})
"""What concerns one connection only (RFC 9110, section 7.6.1), besides what the `Connection` header names."""

CREDENTIALS = frozenset({b"authorization", b"cookie", b"cookie2", b"x-api-key"})
REPLACED_IN_REQUESTS = frozenset({b"host", b"expect", b"content-length", b"forwarded", b"x-real-ip"})
"""What the service sets itself, answers itself (`Expect`), or does not vouch for."""
REQUEST_PREFIXES = (b"proxy-", b"x-forwarded-", b"sec-websocket-")

ORIGIN_WIDE = frozenset(
    {
        b"accept-ch", b"activate-storage-access", b"alt-svc", b"clear-site-data", b"content-location", b"critical-ch", b"document-policy", b"expect-ct",
        b"link", b"nel", b"origin-agent-cluster", b"public-key-pins", b"public-key-pins-report-only", b"refresh", b"report-to", b"reporting-endpoints",
        b"service-worker-allowed", b"set-cookie", b"set-cookie2", b"set-login", b"sourcemap", b"speculation-rules", b"strict-transport-security",
        b"supports-loading-mode", b"timing-allow-origin", b"use-as-dictionary", b"www-authenticate", b"x-sourcemap",
    }
)  # fmt: skip
"""What a browser remembers for, or applies to, the whole origin of the service, or fetches by itself, and what names another resource of the service as
the one that was sent. An authentication challenge would make a browser or a client ask its user for credentials of the service, which would not reach the
program either."""
FOR_PROXIES = frozenset({b"surrogate-control", b"surrogate-key", b"edge-control", b"cdn-cache-control", b"x-sendfile", b"x-reproxy-url", b"status"})
"""What a reverse proxy in front of the service would act on, for example by sending a file of its own."""
REPLACED_IN_ANSWERS = frozenset(
    {
        b"age", b"cache-control", b"content-security-policy", b"content-security-policy-report-only", b"cross-origin-resource-policy", b"date", b"expires",
        b"location", b"pragma", b"referrer-policy", b"server", b"x-content-security-policy", b"x-content-type-options", b"x-request-id", b"x-webkit-csp",
    }
)  # fmt: skip
ANSWER_PREFIXES = (b"access-control-", b"proxy-", b"sec-websocket-", b"x-accel-", b"x-lighttpd-", b"x-sendfile-")

OWN_HEADERS: Headers = [
    (b"content-security-policy", b"sandbox"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
]
"""What every answer of a program carries."""
WITHOUT_BODY = frozenset({204, 304})

_ENCODED_DOT = re.compile(r"%2[eE]")
_SAFE_REFERENCE = re.compile(r"[!-\[\]-~]*")  # printable ASCII without spaces and backslashes, which browsers read as slashes


def forwarded_headers(received: Iterable[tuple[bytes, bytes]], target: PortTarget, scheme: str) -> Headers:
    """The headers of a request that the program gets, without those of its framing.

    Args:
        received: the headers of the client's request.
        target: what it asks for.
        scheme: `http`, `https`, `ws` or `wss`.
    """
    headers = list(received)
    named = _named_by_connection(headers)
    host = next((value for name, value in headers if name.lower() == b"host"), b"")
    kept = [(name, value) for name, value in headers if _is_forwarded(name.lower(), named)]
    proto = b"https" if scheme in ("https", "wss") else b"http"
    own = [(b"x-forwarded-proto", proto), (b"x-forwarded-prefix", target.prefix), *([(b"x-forwarded-host", host)] if host else [])]
    return [(b"host", host_of(target.port)), *kept, *own]


def host_of(port: int) -> bytes:
    """The `Host` header that the program gets. Development servers accept this one, and refuse names that they do not know."""
    return b"localhost:%d" % port


def _is_forwarded(name: bytes, named: frozenset[bytes]) -> bool:
    return name not in HOP_BY_HOP | named | CREDENTIALS | REPLACED_IN_REQUESTS and not name.startswith(REQUEST_PREFIXES)


def _named_by_connection(headers: Headers) -> frozenset[bytes]:
    values = [value for name, value in headers if name.lower() == b"connection"]
    return frozenset(token.strip().lower() for value in values for token in value.split(b","))


def body_headers(received: Iterable[tuple[bytes, bytes]]) -> Headers:
    """The headers of a request that say how long its body is: those of the client's request, or none if it has no body."""
    sizes = {name.lower(): value for name, value in received if name.lower() in (b"content-length", b"transfer-encoding")}
    if b"transfer-encoding" in sizes:
        return [(b"transfer-encoding", b"chunked")]
    return [(b"content-length", sizes[b"content-length"])] if b"content-length" in sizes else []


def answered_headers(sent: Iterable[tuple[bytes, bytes]], status: int, target: PortTarget) -> Headers:
    """The headers of an answer that the client gets.

    Args:
        sent: the headers of the program's answer.
        status: its HTTP status.
        target: what the client has asked for.
    """
    headers = list(sent)
    dropped = HOP_BY_HOP | ORIGIN_WIDE | FOR_PROXIES | REPLACED_IN_ANSWERS | _named_by_connection(headers)
    if status in WITHOUT_BODY or any(name.lower() == b"transfer-encoding" for name, _ in headers):
        dropped |= {b"content-length"}  # of a chunked body it says nothing (RFC 9112, section 6.3), and may be another length
    kept = [(name, value) for name, value in headers if name.lower() not in dropped and not name.lower().startswith(ANSWER_PREFIXES)]
    locations = [value for name, value in headers if name.lower() == b"location"]
    location = own_location(locations[0], target) if len(locations) == 1 else None
    return [*kept, *([(b"location", location)] if location is not None else []), *OWN_HEADERS]


def own_location(location: bytes, target: PortTarget) -> bytes | None:
    """Where a redirect of the program leads below the paths of its port; None if it leads elsewhere.

    A client that follows a redirect within one origin sends its token along, so a redirect to another route of the service would act for the client.

    Args:
        location: the `Location` header of the program's answer.
        target: what the client has asked for.
    """
    reference = location.decode("latin-1")
    if not _SAFE_REFERENCE.fullmatch(reference):
        return None
    authorities = {f"{host}:{target.port}" for host in ("localhost", "127.0.0.1", "[::1]")}
    base = f"http://localhost:{target.port}{target.path.decode('latin-1')}"
    try:
        # Browsers read an encoded dot as a dot, also in `..`.
        parts = urlsplit(urljoin(base, _ENCODED_DOT.sub(".", reference)))
    except ValueError:
        return None
    if parts.scheme != "http" or parts.netloc not in authorities:
        return None
    path = parts.path or "/"
    if ".." in path.split("/") or "." in path.split("/"):
        return None
    prefix = target.prefix.decode("latin-1")
    if path.startswith(prefix + "/"):
        path = path[len(prefix) :]  # the program has read `X-Forwarded-Prefix`
    suffix = ("?" + parts.query if parts.query else "") + ("#" + parts.fragment if parts.fragment else "")
    return (prefix + path + suffix).encode("latin-1")
