"""Declares routes for the OpenAPI document. The handlers read the raw request, so FastAPI cannot derive this from their signatures."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from sandbox_server.api.contract.responses import ProblemAnswer
from sandbox_server.api.problems import MEDIA_TYPE, RETRY_STATUSES, STATUS_OF

REF = "#/components/schemas/{model}"
PROBLEM_REF = REF.format(model=ProblemAnswer.__name__)
ALWAYS = ("internal",)
WITH_TOKEN = ("unauthorized", *ALWAYS)
WITH_BODY = ("invalid_request", "payload_too_large", "quota_exceeded")
WITH_LEASE = ("lease_not_found", "lease_lost", "sandbox_lost")
TEXT = {"type": "string"}
BINARY = {"type": "string", "format": "binary"}

Handler = Callable[[Request], Awaitable[Response]]


class RawRoute(APIRoute):
    """A route whose handler takes the raw request and returns the response, without FastAPI's parsing and rendering."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler: Callable[[Request], Coroutine[Any, Any, Response]] = self.endpoint
        return handler


def parameter(name: str, schema: Mapping[str, Any], description: str, *, location: str = "query", required: bool = False) -> dict[str, Any]:
    """Declare one parameter of a route, in the form of OpenAPI."""
    return {"name": name, "in": location, "required": required, "description": description, "schema": dict(schema)}


LEASE_ID = parameter("lease_id", {"type": "string", "minLength": 1}, "the id of a lease of this tenant", location="path", required=True)
CALL_ID = parameter("call_id", {"type": "string", "pattern": "^[A-Za-z0-9._:-]{1,128}$"}, "the id of a call of that lease", location="path", required=True)
LAST_EVENT_ID = parameter("Last-Event-ID", {"type": "string", "pattern": "^[0-9]{0,18}$"}, "the id of the last event that was received", location="header")


def json_content(model: type[BaseModel]) -> dict[str, Any]:
    """Declare a JSON body of this model, in the form of OpenAPI."""
    return {"application/json": {"schema": {"$ref": REF.format(model=model.__name__)}}}


def describe_route(
    summary: str,
    *,
    codes: Sequence[str],
    response: type[BaseModel] | None = None,
    status: int = 200,
    body: type[BaseModel] | None = None,
    parameters: Sequence[Mapping[str, Any]] = (),
    content: Mapping[str, Any] | None = None,
    body_content: Mapping[str, Any] | None = None,
    also: Mapping[int, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Make the keyword arguments of a route decorator, which declare the route in the OpenAPI document.

    Args:
        summary: what the route does, in one line.
        codes: the error codes of its error responses.
        response: the model of its successful response, if that is JSON.
        status: the HTTP status of its successful response.
        body: the model of the body that it takes, if that is JSON.
        parameters: its path and query parameters, and its headers.
        content: further media types of its successful response.
        body_content: the media types that it takes, in place of `body`.
        also: further responses, by HTTP status.
    """
    success: dict[str, Any] = {"description": "Success"}
    media_types = {**(json_content(response) if response is not None else {}), **(content or {})}
    if media_types:
        success["content"] = media_types
    responses = {str(status): success, **_problems(codes), **{str(other): dict(declared) for other, declared in (also or {}).items()}}
    extra: dict[str, Any] = {"responses": responses, "parameters": [dict(item) for item in parameters]}
    takes = body_content if body_content is not None else json_content(body) if body is not None else None
    if takes is not None:
        extra["requestBody"] = {"required": body_content is None, "content": dict(takes)}
    return {"summary": summary, "openapi_extra": extra, "response_class": Response, "status_code": status}


def _problems(codes: Sequence[str]) -> dict[str, Any]:
    by_status: dict[int, list[str]] = {}
    for code in dict.fromkeys(codes):
        by_status.setdefault(STATUS_OF[code], []).append(code)
    responses: dict[str, Any] = {}
    for status, names in sorted(by_status.items()):
        response: dict[str, Any] = {"description": " · ".join(f"`{name}`" for name in names), "content": {MEDIA_TYPE: {"schema": {"$ref": PROBLEM_REF}}}}
        if status in RETRY_STATUSES:
            response["headers"] = {"Retry-After": {"description": "seconds", "schema": {"type": "integer", "minimum": 1}}}
        responses[str(status)] = response
    return responses
