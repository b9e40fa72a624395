"""What every request and every WebSocket handshake passes before its route: request id, authentication, limits of its head, errors, a log line.

Only this module converts errors into responses. Routes raise the errors of `core.errors`; `problems` has the table that renders them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time

from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketDisconnect

from sandbox_server.api.body import ClientDisconnected, ClientStalled
from sandbox_server.api.limits import Limits, too_many
from sandbox_server.api.request_context import REQUEST_CONTEXT_KEY, SERVICE_KEY, RequestContext, Service
from sandbox_server.api.response_tracker import HttpResponseTracker, ResponseTracker
from sandbox_server.api.tenants import Tenant
from sandbox_server.api.websocket import WebSocketTracker, authorization_of_subprotocol, bearer_subprotocol
from sandbox_server.core.errors import Internal, PoolServiceError, Stopping, Unauthorized
from sandbox_server.telemetry import request_fields

log = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/", "/docs", "/healthz", "/readyz", "/v1/agent.pyz"})
"""The paths that need no token."""
NO_TENANT = Tenant(name="")
REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


class EdgeMiddleware:
    """The ASGI application that wraps the routes.

    Args:
        app: the routes.

    Attributes:
        service: what the routes work with; to be set before the first request.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.service: Service | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.service is None:
            raise RuntimeError("the service has not been started")
        authorization, given_id, header_bytes = _read_headers(scope)
        response: ResponseTracker
        if scope["type"] == "websocket":
            response = WebSocketTracker(scope, receive, send, _request_id(given_id))
            subprotocol = bearer_subprotocol(scope)
            if authorization is None and subprotocol is not None:
                authorization = authorization_of_subprotocol(subprotocol)
        else:
            response = HttpResponseTracker(receive, send, _request_id(given_id))
        task = asyncio.current_task()
        assert task is not None
        started = time.perf_counter()
        self.service.requests.add(task)
        try:
            await self._respond(self.service, scope, response, authorization, header_bytes)
        except asyncio.CancelledError:
            if not self.service.stopping.done():
                raise
            task.uncancel()
            await _send_error(response, scope, Stopping())
        finally:
            self.service.requests.discard(task)
            if log.isEnabledFor(logging.INFO):
                duration_s = round(time.perf_counter() - started, 6)
                log.info("request", extra={**_request_line(scope), "status": response.status, "duration_s": duration_s})

    async def _respond(self, service: Service, scope: Scope, response: ResponseTracker, authorization: bytes | None, header_bytes: int) -> None:
        """Admit the request and call its route. If one of them raises an error, respond with that error."""
        try:
            _admit(service, scope, response, authorization, header_bytes)
            await self._app(scope, response.receive, response.send)
        except PoolServiceError as error:
            await _send_error(response, scope, error)
        except ClientStalled as stalled:
            log.warning("a connection is closed", extra={"path": scope["path"], "detail": str(stalled)})
            response.abort()
        except (ClientDisconnected, WebSocketDisconnect):
            _log_disconnect(scope)
        except Exception:  # the edge of a request: a bug ends this one request, and no other
            log.exception("a request failed", extra=_request_line(scope))
            await _send_error(response, scope, Internal())


def _admit(service: Service, scope: Scope, response: ResponseTracker, authorization: bytes | None, header_bytes: int) -> None:
    """Authenticate a request, check its head, and put the service and the context of the request into its scope.

    Raises:
        Unauthorized: it carries no valid token, and its path requires one.
        InvalidRequest: its headers, path or query are too large.
    """
    request_fields.set({"request_id": response.request_id})
    tenant, refusal = _authenticate(service, authorization)
    # A connection without a valid token gets one response: many requests on each of many such connections would delay all other clients.
    response.closes_connection = refusal is not None
    _check_head(service.limits, scope, header_bytes)
    is_open = scope["path"] in OPEN_PATHS
    if refusal is not None and not is_open:
        raise refusal
    context = RequestContext(tenant=NO_TENANT if is_open else tenant, request_id=response.request_id)
    scope[SERVICE_KEY] = service
    scope[REQUEST_CONTEXT_KEY] = context
    request_fields.set({"request_id": context.request_id, "tenant": context.tenant.name})


async def _send_error(response: ResponseTracker, scope: Scope, error: PoolServiceError) -> None:
    try:
        await response.send_error(error)
    except ClientDisconnected:
        _log_disconnect(scope)


def _log_disconnect(scope: Scope) -> None:
    log.info("the client disconnected", extra={"path": scope["path"]})


def _request_line(scope: Scope) -> dict[str, str]:
    return {"method": scope.get("method", "WEBSOCKET"), "path": scope["path"]}


def _authenticate(service: Service, authorization: bytes | None) -> tuple[Tenant, Unauthorized | None]:
    """The tenant of a token; for an invalid or missing token, `NO_TENANT` and the error that says why."""
    try:
        return service.tenants.authenticate(authorization), None
    except Unauthorized as error:
        return NO_TENANT, error


def _read_headers(scope: Scope) -> tuple[bytes | None, bytes | None, int]:
    """The `Authorization` header, the `X-Request-ID` header, and the size of all headers in bytes."""
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


def _request_id(given_id: bytes | None) -> str:
    """The request id that the client sent, if it is a valid one; otherwise a new one."""
    if given_id is not None and REQUEST_ID.fullmatch(given_id):
        return given_id.decode("ascii")
    return os.urandom(8).hex()
