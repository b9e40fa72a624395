"""The folder of modules that run in slots, compiled for the interpreter that runs init.

An agent that runs from a folder shares one that was written beside it, which no slot can change. Any other agent writes its own.
"""

from __future__ import annotations

import importlib.util
import os
import pkgutil

from sandbox_server.agent import init, inslot, template
from sandbox_server.agent.bytecode import compiled, compiled_path

#: The name of the folder beside an unpacked agent that agents share.
SHARED_SLOT_LIB = "slot_lib"
_PACKAGE = "sandbox_server"


def list_slot_modules() -> list[str]:
    """Return the paths of the modules that run in slots, relative to the folder that contains them."""
    modules = ["__init__"]
    for package in (init, inslot, template):
        folder = package.__name__.rpartition(".")[2]
        modules.append("%s/__init__" % folder)
        modules.extend("%s/%s" % (folder, module.name) for module in pkgutil.iter_modules(package.__path__))
    return ["%s/__init__.py" % _PACKAGE, *("%s/agent/%s.py" % (_PACKAGE, name) for name in modules)]


def _read_module(name: str) -> bytes:
    if "/agent/" not in name:
        return b""  # The package around the agent has no code.
    content = pkgutil.get_data("%s.agent" % _PACKAGE, name.split("/agent/", 1)[1])
    if content is None:
        raise FileNotFoundError(name)
    return content


def provide_slot_lib(folder: str) -> str:
    """Return the folder of the modules that run in slots: the one beside this agent if there is one, otherwise a new one.

    Args:
        folder: the folder to make if there is none to share.

    Raises:
        OSError: a file cannot be written.
    """
    shared = os.path.join(_find_agent_folder(), SHARED_SLOT_LIB)
    if os.path.isdir(shared):
        return shared
    write_slot_lib(folder)
    return folder


def _find_agent_folder() -> str:
    """Return what the package of the agent was imported from: a folder or a zipapp."""
    return os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(init.__path__[0]))))


def write_slot_lib(folder: str) -> None:
    """Write the modules that run in slots, and no others, to a new folder that every slot can read.

    Args:
        folder: the folder to make.

    Raises:
        OSError: a file cannot be written.
    """
    os.makedirs(folder, mode=0o755)
    os.chmod(folder, 0o755)
    for name in list_slot_modules():
        _write_module(folder, name, _read_module(name))


def _write_module(folder: str, name: str, content: bytes) -> None:
    path = os.path.join(folder, name)
    parent = os.path.dirname(path)
    os.makedirs(parent, exist_ok=True)
    cache = os.path.dirname(compiled_path(path))
    os.makedirs(cache, exist_ok=True)
    for made in (parent, cache):
        os.chmod(made, 0o755)
    with open(path, "wb") as file:
        file.write(content)
    cached = compiled_path(path)
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
