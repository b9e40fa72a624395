"""The machine-readable contract, read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

CONTRACT: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("contract.yaml").read_text(encoding="utf-8"))
ANY = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")
ROUTES: list[dict[str, Any]] = [
    {**route, "method": method} for route in CONTRACT["routes"] for method in (ANY if route["method"] == "ANY" else (route["method"],))
]
BUILT = [route for route in ROUTES if "waits" not in route and "websocket" not in route]
WEBSOCKETS = [route for route in ROUTES if "websocket" in route]
WAITING = [route for route in ROUTES if "waits" in route]


def named(route: dict[str, Any]) -> str:
    """A route as test ids call it."""
    return f"{route['method']} {route['path']}"


def members(answer: Any) -> set[str]:
    """The members of an answer, spelled out or by the name of a shape."""
    return set(CONTRACT["shapes"][answer] if isinstance(answer, str) else answer)
