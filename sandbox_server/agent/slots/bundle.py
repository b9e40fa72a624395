"""Writes the folder of modules that run in slots. Each agent writes it once, compiled for the interpreter that runs init."""

from __future__ import annotations

import importlib.util
import os
import pkgutil
import sys

from sandbox_server.agent import init, inslot, template
from sandbox_server.agent.bytecode import compiled

_PACKAGE = "sandbox_server"


def _list_modules() -> list[str]:
    modules = ["__init__"]
    for package in (init, inslot, template):
        folder = package.__name__.rpartition(".")[2]
        modules.append("%s/__init__" % folder)
        modules.extend("%s/%s" % (folder, module.name) for module in pkgutil.iter_modules(package.__path__))
    return ["%s/agent/%s.py" % (_PACKAGE, name) for name in modules]


def _read_module(name: str) -> bytes:
    content = pkgutil.get_data("%s.agent" % _PACKAGE, name.split("/agent/", 1)[1])
    if content is None:
        raise FileNotFoundError(name)
    return content


def write_slot_lib(folder: str) -> None:
    """Write the modules that run in slots, and no others, to a new folder that every slot can read.

    Args:
        folder: the folder to make.

    Raises:
        OSError: a file cannot be written.
    """
    os.makedirs(folder, mode=0o755)
    os.chmod(folder, 0o755)
    _write_module(folder, "%s/__init__.py" % _PACKAGE, b"")
    for name in _list_modules():
        _write_module(folder, name, _read_module(name))


def _write_module(folder: str, name: str, content: bytes) -> None:
    path = os.path.join(folder, name)
    parent = os.path.dirname(path)
    os.makedirs(parent, exist_ok=True)
    cache = os.path.join(parent, "__pycache__")
    os.makedirs(cache, exist_ok=True)
    for made in (parent, cache):
        os.chmod(made, 0o755)
    with open(path, "wb") as file:
        file.write(content)
    cached = os.path.join(cache, "%s.%s.pyc" % (os.path.basename(path)[:-3], sys.implementation.cache_tag))
    with open(cached, "wb") as file:
        file.write(_compiled(name, content))
    for made in (path, cached):
        os.chmod(made, 0o644)


def _compiled(name: str, content: bytes) -> bytes:
    """Return the compiled module: from the zipapp if the same interpreter built that, otherwise compiled now."""
    if name.startswith("%s/agent/" % _PACKAGE):
        try:
            ready = _read_module(name + "c")
        except OSError:
            ready = b""  # the agent runs from a source tree, which has no compiled modules
        if ready[: len(importlib.util.MAGIC_NUMBER)] == importlib.util.MAGIC_NUMBER:
            return ready
    return compiled(name, content)
