"""The page that shows the OpenAPI document. The page itself is static and open; the document that it loads needs a token."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from sandbox_server.api.contract.describe import ALWAYS, TEXT, RawRoute, describe_route

router = APIRouter(route_class=RawRoute, tags=["service"])

HTML_TYPE = "text/html"
PAGE = (Path(__file__).parents[1] / "docs.html").read_bytes()
HEADERS = {
    # Only scripts of the page itself run, it can connect to this service alone, and no other page can embed it.
    "content-security-policy": (
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


@router.get("/docs", **describe_route("The OpenAPI document to read", codes=ALWAYS, content={HTML_TYPE: {"schema": TEXT}}))
async def docs(request: Request) -> Response:
    """A page that asks for a token and shows `/openapi.json` with it."""
    return Response(PAGE, media_type=HTML_TYPE, headers=HEADERS)
