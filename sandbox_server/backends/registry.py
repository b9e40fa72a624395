"""The backends by name. The module of a backend is imported when the first pool uses it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sandbox_server.backends.base import Backend
from sandbox_server.core.errors import InvalidRequest, NotImplementedHere

#: name -> `module:function`, where the function is a `MakeBackend`
BUILT: Mapping[str, str] = {"local": "sandbox_server.backends.local:make_local_backend"}

#: name -> the extra of the package that installs the backend's client library
EXTRAS: Mapping[str, str] = {}

#: Names that the HTTP contract has and this version does not serve.
NOT_BUILT = frozenset({"docker", "nomad", "modal"})

MakeBackend = Callable[..., Backend]
"""Makes a backend from the state folder, the owner, whether sandboxes outlive the service, and the operator's settings as keyword arguments."""


def load_backend(
    name: str, state_dir: Path, owner: str = "local", outlives_service: bool = False, settings: Mapping[str, Any] = MappingProxyType({})
) -> Backend:
    """Make the backend of a name.

    Args:
        name: the name, as a pool's spec gives it.
        state_dir: the service's state folder. A backend keeps its files in a folder of its own in there.
        owner: the owner of the backend's sandboxes; `list_owned` finds them by it.
        outlives_service: whether the sandboxes are to outlive the service, because its records do.
        settings: the operator's settings for this backend, such as its credentials, by the names of the arguments of its `MakeBackend`.

    Raises:
        NotImplementedHere: this version does not have the backend.
        InvalidRequest: no version has the backend, or a library that it needs is not installed.
    """
    if name in NOT_BUILT:
        raise NotImplementedHere(f"backend {name!r} is not built yet; there is {', '.join(BUILT)}", field="backend")
    if name not in BUILT:
        raise InvalidRequest(f"there is no backend {name!r}; there is {', '.join(BUILT)}", field="backend")
    module, _, attribute = BUILT[name].partition(":")
    try:
        make: MakeBackend = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        extra = EXTRAS.get(name, "server")
        raise InvalidRequest(f"backend {name!r} needs {error.name!r}: in a clone of the repository: pip install '.[{extra}]'", field="backend") from error
    return make(state_dir, owner, outlives_service, **settings)
