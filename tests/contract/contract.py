"""The machine-readable contract, read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

CONTRACT: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("contract.yaml").read_text(encoding="utf-8"))
ANY = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")
SAMPLE_OF_ANY = ("GET", "POST")
"""The methods with which tests ask a route for any method: one without a body and one with a body. The service treats the others alike."""


def _routes(methods_of_any: tuple[str, ...]) -> list[dict[str, Any]]:
    return [{**route, "method": method} for route in CONTRACT["routes"] for method in (methods_of_any if route["method"] == "ANY" else (route["method"],))]


DOCUMENTED = _routes(ANY)
ROUTES = _routes(SAMPLE_OF_ANY)
BUILT = [route for route in ROUTES if "waits" not in route and "websocket" not in route]
WEBSOCKETS = [route for route in ROUTES if "websocket" in route]
WAITING = [route for route in ROUTES if "waits" in route]


def shape(path: str) -> str:
    """A path with its parameters nameless."""
    return "/".join("{}" if part.startswith("{") else part for part in path.split("/"))


def named(route: dict[str, Any]) -> str:
    """A route as test ids call it."""
    return f"{route['method']} {route['path']}"


def members(answer: Any) -> set[str]:
    """The members of an answer, spelled out or by the name of a shape."""
    return set(CONTRACT["shapes"][answer] if isinstance(answer, str) else answer)
