"""The HTTP side of the service as one ASGI application: the edge middleware around the routes, and the OpenAPI document that describes them."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from sandbox_server.api.contract import requests, responses
from sandbox_server.api.contract.describe import REF, RawRoute
from sandbox_server.api.contract.render import json_response
from sandbox_server.api.edge import OPEN_PATHS, EdgeMiddleware
from sandbox_server.api.routes import (
    call_queries,
    calls,
    docs,
    events,
    files,
    leases,
    metrics,
    pending,
    pools,
    ports,
    recordings,
    run_batch,
    sandboxes,
    system,
    terminals,
)
from sandbox_server.core.errors import InvalidRequest, MethodNotAllowed, RouteNotFound

ROUTERS = (
    calls.router,
    run_batch.router,
    leases.router,
    call_queries.router,
    files.router,
    ports.router,
    terminals.router,
    recordings.router,
    pools.router,
    sandboxes.router,
    events.router,
    metrics.router,
    docs.router,
    system.router,
    pending.router,
)
TITLE = "Sandbox pool"
API_VERSION = "1"


class RoutedApplication(FastAPI):
    """The routes, as an ASGI application that raises every error.

    `EdgeMiddleware` is the one place that renders errors, so FastAPI's own middleware and exception handlers are left out.
    """

    def __init__(self) -> None:
        super().__init__(title=TITLE, version=API_VERSION, docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
        self.router.default = _raise_not_found
        for router in ROUTERS:
            self.include_router(router)
        self._routes_in_order = [(route.path_regex, route.methods or set(), route) for route in every_route()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Find the handler of a request and send its response.

        FastAPI's router takes three times as long as all else that precedes a handler. It is left what has no handler here: other paths and methods,
        and WebSocket handshakes.
        """
        if scope["type"] != "http" or scope.get("root_path"):
            await super().__call__(scope, receive, send)
            return
        path, method = scope["path"], scope["method"]
        for pattern, methods, route in self._routes_in_order:
            match = pattern.match(path)
            if match is not None and method in methods:
                scope["route"] = route
                scope["path_params"] = {name: route.param_convertors[name].convert(text) for name, text in match.groupdict().items()}
                await _respond(route.endpoint, scope, receive, send)
                return
        await super().__call__(scope, receive, send)

    def build_middleware_stack(self) -> ASGIApp:
        return self._route

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.router(scope, receive, send)
        except HTTPException as error:
            raise _service_error(error, scope) from None


async def _respond(handler: Callable[[Request], Awaitable[Response]], scope: Scope, receive: Receive, send: Send) -> None:
    try:
        response = await handler(Request(scope, receive, send))
        await response(scope, receive, send)
    except HTTPException as error:
        raise _service_error(error, scope) from None


async def _raise_not_found(scope: Scope, receive: Receive, send: Send) -> None:
    """What the router calls for a path that no route matches."""
    kind = "WebSocket route" if scope["type"] == "websocket" else "route"
    raise RouteNotFound(f"there is no {kind} {scope['path']}")


def _service_error(error: HTTPException, scope: Scope) -> MethodNotAllowed | InvalidRequest:
    """The service's own error for one that FastAPI's router raises."""
    path = scope["path"]
    if error.status_code == 405:
        allowed = ", ".join(allowed_methods(path))
        return MethodNotAllowed(f"{path} takes {allowed}, not {scope['method']}", allow=allowed)
    return InvalidRequest(str(error.detail))


def every_route() -> list[APIRoute]:
    """Every HTTP route of the contract, in the order in which requests are matched against them."""
    return [route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)]


def allowed_methods(path: str) -> list[str]:
    """The HTTP methods that a path takes, sorted."""
    return sorted({method for route in every_route() if route.path_regex.match(path) for method in route.methods or ()})


def build_api() -> EdgeMiddleware:
    """Build the whole HTTP side of the service. It responds to requests once its `service` is set."""
    app = RoutedApplication()
    responses_made: list[Response] = []

    async def get_openapi_document(request: Request) -> Response:
        if not responses_made:
            responses_made.append(json_response(openapi_document(app)))
        return responses_made[0]

    router = APIRouter(route_class=RawRoute)
    router.add_api_route("/openapi.json", get_openapi_document, include_in_schema=False)
    app.include_router(router)
    return EdgeMiddleware(app)


def openapi_document(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document of the routes.

    FastAPI makes it from the routes' declarations. Schemas and security schemes are added here, because the handlers read the raw request, and
    FastAPI does not see what they take.
    """
    document = app.openapi()
    members = [*inspect.getmembers(requests, inspect.isclass), *inspect.getmembers(responses, inspect.isclass)]
    models = [model for _, model in members if issubclass(model, BaseModel) and model is not BaseModel]
    _, definitions = models_json_schema([(model, "validation") for model in models], ref_template=REF)
    components = document.setdefault("components", {})
    components["schemas"] = definitions.get("$defs", {})
    components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            operation["security"] = [] if path in OPEN_PATHS else [{"bearer": []}]
            operation["responses"] = {status: response for status, response in operation["responses"].items() if _is_declared(response)}
    return document


def _is_declared(response: dict[str, Any]) -> bool:
    """Whether a response of the document was declared by a route, and not added by FastAPI."""
    return response.get("description") not in ("Validation Error", "Successful Response")
