"""Backends by name. A backend's module is imported when the first pool asks for it, and not before."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sandbox_server.backends.base import Backend
from sandbox_server.core.errors import InvalidRequest, NotImplementedHere

#: name -> where to find a `make(state_dir, owner, survives, **settings) -> Backend`
BUILT: Mapping[str, str] = {"local": "sandbox_server.backends.local:make_local_backend"}

#: name -> the extra that its client library comes with
EXTRAS: Mapping[str, str] = {}

#: Names that the contract has and this version does not.
NOT_BUILT = frozenset({"docker", "nomad", "modal"})

Make = Callable[..., Backend]


def load_backend(name: str, state_dir: Path, owner: str = "local", survives: bool = False, settings: Mapping[str, Any] = MappingProxyType({})) -> Backend:
    """Make the backend of this name.

    Args:
        name: as a pool spec says it.
        state_dir: the service's folder; a backend keeps what it must under a folder of its own in there.
        owner: who its sandboxes belong to; `list_owned` finds them by it.
        survives: whether its sandboxes are to outlive the service, because its state does.
        settings: what else the operator has decided about it, as its `make` takes it.

    Raises:
        NotImplementedHere: this version does not have it.
        InvalidRequest: no version has it, or what it needs is not installed.
    """
    if name in NOT_BUILT:
        raise NotImplementedHere(f"backend {name!r} is not built yet; there is {', '.join(BUILT)}", field="backend")
    if name not in BUILT:
        raise InvalidRequest(f"there is no backend {name!r}; there is {', '.join(BUILT)}", field="backend")
    module, _, attribute = BUILT[name].partition(":")
    try:
        make: Make = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        extra = EXTRAS.get(name, "server")
        raise InvalidRequest(f"backend {name!r} needs {error.name!r}: in a clone of the repository: pip install '.[{extra}]'", field="backend") from error
    return make(state_dir, owner, survives, **settings)
