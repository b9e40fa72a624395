"""The HTTP side, put together: the routes behind the front door, and the document that describes them."""

from __future__ import annotations

import inspect
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
from sandbox_server.api.routes import calls, docs, events, figures, files, leases, pending, pools, records, sandboxes, system
from sandbox_server.core.errors import InvalidRequest, MethodNotAllowed, RouteNotFound

ROUTERS = (
    calls.router,
    leases.router,
    records.router,
    files.router,
    pools.router,
    sandboxes.router,
    events.router,
    figures.router,
    docs.router,
    system.router,
    pending.router,
)
TITLE = "Sandbox pool"
API_VERSION = "1"


class Routes(FastAPI):
    """The routes. Errors leave as they are: the front door is the one place that renders them, so FastAPI's own stack of handlers is left out."""

    def build_middleware_stack(self) -> ASGIApp:
        return self._answer

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.router(scope, receive, send)
        except HTTPException as error:
            raise _translate(error, scope) from None


def _translate(error: HTTPException, scope: Scope) -> RouteNotFound | MethodNotAllowed | InvalidRequest:
    path = scope["path"]
    if error.status_code == 404:
        return RouteNotFound(f"there is no route {path}")
    if error.status_code == 405:
        allowed = ", ".join(allowed_methods(path))
        return MethodNotAllowed(f"{path} takes {allowed}, not {scope['method']}", allow=allowed)
    return InvalidRequest(str(error.detail))


def every_route() -> list[APIRoute]:
    """Every route of the contract, in the order in which they are tried."""
    return [route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)]


def allowed_methods(path: str) -> list[str]:
    """What may be asked of a path."""
    return sorted({method for route in every_route() if route.path_regex.match(path) for method in route.methods or ()})


def build_routes() -> Routes:
    """Every route of the contract, with no door before it."""
    app = Routes(title=TITLE, version=API_VERSION, docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    for router in ROUTERS:
        app.include_router(router)
    return app


def build_api() -> EdgeMiddleware:
    """The whole HTTP side as one ASGI application; it answers once its `service` is set."""
    app = build_routes()
    described: list[Response] = []

    async def openapi_document(request: Request) -> Response:
        if not described:
            described.append(json_response(document(app)))
        return described[0]

    own = APIRouter(route_class=RawRoute)
    own.add_api_route("/openapi.json", openapi_document, include_in_schema=False)
    app.include_router(own)
    return EdgeMiddleware(app)


def document(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document."""
    return _complete(app.openapi())


def _complete(found: dict[str, Any]) -> dict[str, Any]:
    """Add what FastAPI cannot know of handlers that read the raw request."""
    members = [*inspect.getmembers(requests, inspect.isclass), *inspect.getmembers(responses, inspect.isclass)]
    models = [model for _, model in members if issubclass(model, BaseModel) and model is not BaseModel]
    _, definitions = models_json_schema([(model, "validation") for model in models], ref_template=REF)
    components = found.setdefault("components", {})
    components["schemas"] = definitions.get("$defs", {})
    components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    for path, operations in found["paths"].items():
        for operation in operations.values():
            operation["security"] = [] if path in OPEN_PATHS else [{"bearer": []}]
            operation["responses"] = {status: answer for status, answer in operation["responses"].items() if _is_ours(answer)}
    return found


def _is_ours(answer: dict[str, Any]) -> bool:
    return answer.get("description") not in ("Validation Error", "Successful Response")
