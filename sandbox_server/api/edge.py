"""The front door, as plain ASGI: request ids, authentication, errors into problem documents, a log line a request."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sandbox_server.api.body import CallerGone, CallerStalled
from sandbox_server.api.limits import Limits, too_many
from sandbox_server.api.problems import Problem, problem_of
from sandbox_server.api.service import CALLER_KEY, SERVICE_KEY, Caller, Service
from sandbox_server.api.tenants import Tenant
from sandbox_server.core.errors import Internal, NotImplementedHere, PoolServiceError, RouteNotFound, Stopping, Unauthorized
from sandbox_server.telemetry import request_fields

log = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/", "/docs", "/healthz", "/readyz", "/v1/agent.pyz"})
NOBODY = Tenant(name="")
REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
LINGER_BYTES = 64 << 20
LINGER_S = 5.0
CLOSE = ((b"connection", b"close"),)
WS_UNAUTHORIZED = 4401
WS_FAILED = 1011
TERMINAL_PATH = re.compile(r"/v1/leases/[^/]+/terminal")
BEARER_SUBPROTOCOL = "bearer."


class ResponseTracker:
    """One request on its way: what of its answer has been sent, and under which id."""

    __slots__ = ("_header", "_send", "closes", "request_id", "status")

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._header = (b"x-request-id", request_id.encode())
        self.request_id = request_id
        self.status = 0
        #: whether the connection is closed after the answer, and what came on it beyond this request is not looked at
        self.closes = False

    async def send(self, message: Message) -> None:
        """Pass on what the application sends, with the request id among the headers."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), self._header, *(CLOSE if self.closes else ())]
        await self._send(message)

    def abort(self) -> None:
        """Close the connection with what is still to be written to it, where the server is uvicorn: another would wait for it to be read."""
        transport = getattr(getattr(self._send, "__self__", None), "transport", None)
        if isinstance(transport, asyncio.Transport):
            transport.abort()

    async def send_problem(self, problem: Problem, *, more: bool = False) -> None:
        """Answer with an error; with `more`, leave the response open after its last byte."""
        headers = [(name.encode(), value.encode()) for name, value in problem.headers.items()]
        headers.append((b"content-length", str(len(problem.body)).encode()))
        await self.send({"type": "http.response.start", "status": problem.status, "headers": headers})
        await self.send({"type": "http.response.body", "body": problem.body, "more_body": more})


class EdgeMiddleware:
    """Wraps the application.

    Args:
        app: what answers.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.service: Service | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.service is None:
            raise RuntimeError("the service has not been started")
        scope[SERVICE_KEY] = self.service
        if scope["type"] == "http":
            await self._http(self.service, scope, receive, send)
        elif scope["type"] == "websocket":
            await self._websocket(self.service, scope, receive, send)

    async def _http(self, service: Service, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.perf_counter()
        authorization, claimed_id, header_bytes = _headers(scope)
        exchange = ResponseTracker(send, _request_id(claimed_id))
        task = asyncio.current_task()
        assert task is not None
        service.requests.add(task)
        caller = Caller(tenant=NOBODY, request_id=exchange.request_id)
        request_fields.set({"request_id": exchange.request_id})
        try:
            tenant, refused = _authenticated(service, authorization)
            # A connection without a valid token gets one answer: many requests on each of many connections would hold everybody up.
            exchange.closes = refused is not None
            _check_head(service.limits, scope, header_bytes)
            if scope["path"] not in OPEN_PATHS:
                if refused is not None:
                    raise refused
                caller = Caller(tenant=tenant, request_id=exchange.request_id)
            scope[CALLER_KEY] = caller
            request_fields.set({"request_id": exchange.request_id, "tenant": caller.tenant.name})
            await self._app(scope, receive, exchange.send)
        except PoolServiceError as error:
            await answer_error(exchange, receive, error)
        except CallerStalled as stalled:
            log.warning("a connection is closed", extra={"path": scope["path"], "detail": str(stalled)})
            exchange.abort()
        except CallerGone:
            log.info("the caller hung up", extra={"path": scope["path"]})
        except asyncio.CancelledError:
            if not service.stopping.done():
                raise
            task.uncancel()
            await answer_error(exchange, receive, Stopping())
        except Exception:  # the edge of a request: a bug costs this request its answer, and nobody else anything
            log.exception("a request failed", extra={"method": scope["method"], "path": scope["path"]})
            await answer_error(exchange, receive, Internal())
        finally:
            service.requests.discard(task)
            if log.isEnabledFor(logging.INFO):
                took = round(time.perf_counter() - started, 6)
                log.info("request", extra={"method": scope["method"], "path": scope["path"], "status": exchange.status, "duration_s": took})

    async def _websocket(self, service: Service, scope: Scope, receive: Receive, send: Send) -> None:
        authorization, claimed_id, _ = _headers(scope)
        await receive()
        protocol = next((name for name in scope.get("subprotocols", ()) if name.startswith(BEARER_SUBPROTOCOL)), None)
        if authorization is None and protocol is not None:
            authorization = b"Bearer " + protocol.removeprefix(BEARER_SUBPROTOCOL).encode()
        try:
            service.tenants.authenticate(authorization)
        except Unauthorized as error:
            await send({"type": "websocket.accept", "subprotocol": protocol})
            await send({"type": "websocket.close", "code": WS_UNAUTHORIZED, "reason": error.detail})
            return
        await self._refuse_websocket(scope, send, _request_id(claimed_id))

    async def _refuse_websocket(self, scope: Scope, send: Send, request_id: str) -> None:
        error = NotImplementedHere("terminals are not built yet") if TERMINAL_PATH.fullmatch(scope["path"]) else RouteNotFound()
        problem = problem_of(error, request_id)
        if "websocket.http.response" not in scope.get("extensions", {}):
            await send({"type": "websocket.close", "code": WS_FAILED, "reason": error.detail})
            return
        headers = [(name.encode(), value.encode()) for name, value in {**problem.headers, "x-request-id": request_id}.items()]
        await send({"type": "websocket.http.response.start", "status": problem.status, "headers": headers})
        await send({"type": "websocket.http.response.body", "body": problem.body})


async def answer_error(exchange: ResponseTracker, receive: Receive, error: PoolServiceError) -> None:
    """Answer with a problem document, if nothing has been answered yet; else the response just stops, which breaks the connection."""
    if exchange.status:
        log.warning("a response was cut off", extra={"code": error.code, "detail": error.detail})
        return
    problem = problem_of(error, exchange.request_id)
    linger = exchange.closes or problem.headers.get("connection") == "close"
    await exchange.send_problem(problem, more=linger)
    if linger:
        # Closing while the caller still sends would reset the connection, and it might never see why.
        await _discard_body(receive)
        await exchange.send({"type": "http.response.body", "body": b"", "more_body": False})


async def _discard_body(receive: Receive) -> None:
    seen = 0
    try:
        async with asyncio.timeout(LINGER_S):
            while seen < LINGER_BYTES:
                message = await receive()
                seen += len(message.get("body", b""))
                if message["type"] != "http.request" or not message.get("more_body"):
                    return
    except TimeoutError:
        log.info("the caller kept sending a body that was refused")


def _authenticated(service: Service, authorization: bytes | None) -> tuple[Tenant, Unauthorized | None]:
    """Whose token it is; nobody's, and why, where it is none."""
    try:
        return service.tenants.authenticate(authorization), None
    except Unauthorized as error:
        return NOBODY, error


def _headers(scope: Scope) -> tuple[bytes | None, bytes | None, int]:
    authorization: bytes | None = None
    request_id: bytes | None = None
    size_bytes = 0
    for name, value in scope["headers"]:
        size_bytes += len(name) + len(value)
        if name == b"authorization":
            authorization = value
        elif name == b"x-request-id":
            request_id = value
    return authorization, request_id, size_bytes


def _check_head(limits: Limits, scope: Scope, header_bytes: int) -> None:
    if header_bytes > limits.header_bytes:
        raise too_many(limits, "header_bytes", "headers")
    if len(scope["path"]) + len(scope["query_string"]) > limits.query_bytes:
        raise too_many(limits, "query_bytes", "query")


def _request_id(claimed: bytes | None) -> str:
    if claimed is not None and REQUEST_ID.fullmatch(claimed):
        return claimed.decode("ascii")
    return secrets.token_hex(8)
