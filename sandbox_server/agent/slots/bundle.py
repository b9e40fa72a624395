"""The folder of code that init and its forks import: copied out of this package once per agent, compiled for the interpreter that will run it."""

from __future__ import annotations

import importlib.util
import os
import pkgutil
import sys

from sandbox_server.agent import init, inslot
from sandbox_server.agent.bytecode import compiled

_PACKAGE = "sandbox_server"


def _names() -> list[str]:
    modules = ["__init__"]
    for package in (init, inslot):
        folder = package.__name__.rpartition(".")[2]
        modules.append("%s/__init__" % folder)
        modules.extend("%s/%s" % (folder, module.name) for module in pkgutil.iter_modules(package.__path__))
    return ["%s/agent/%s.py" % (_PACKAGE, name) for name in modules]


def _data(name: str) -> bytes:
    content = pkgutil.get_data("%s.agent" % _PACKAGE, name.split("/agent/", 1)[1])
    if content is None:
        raise FileNotFoundError(name)
    return content


def write_slot_lib(folder: str) -> None:
    """Fill `folder` with the package as a slot needs it: readable by every slot, compiled, nothing more than slots run."""
    os.makedirs(folder, mode=0o755)
    os.chmod(folder, 0o755)
    _put(folder, "%s/__init__.py" % _PACKAGE, b"")
    for name in _names():
        _put(folder, name, _data(name))


def _put(folder: str, name: str, content: bytes) -> None:
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
    """From the zipapp where that was built by this interpreter, else compiled now."""
    if name.startswith("%s/agent/" % _PACKAGE):
        try:
            ready = _data(name + "c")
        except OSError:
            ready = b""  # running from a source tree
        if ready[: len(importlib.util.MAGIC_NUMBER)] == importlib.util.MAGIC_NUMBER:
            return ready
    return compiled(name, content)
