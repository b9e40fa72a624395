"""The OpenAPI document for people: a static shell, whose data needs the token."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from sandbox_server.api.contract.describe import ALWAYS, TEXT, RawRoute, described

router = APIRouter(route_class=RawRoute, tags=["service"])

HTML_TYPE = "text/html"
SHELL = (Path(__file__).parents[1] / "docs.html").read_bytes()
HEADERS = {
    # Only what is in the file itself runs, it talks to this service alone, and nobody frames it.
    "content-security-policy": (
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


@router.get("/docs", **described("The OpenAPI document to read", codes=ALWAYS, content={HTML_TYPE: {"schema": TEXT}}))
async def docs(request: Request) -> Response:
    """A page that asks for a token and shows `/openapi.json`."""
    return Response(SHELL, media_type=HTML_TYPE, headers=HEADERS)
