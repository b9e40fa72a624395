"""Unpacks the agent into a folder from which every agent of a service starts without compiling a module."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import tempfile
import zipfile
from pathlib import Path

from sandbox_server.agent.bytecode import compiled_path
from sandbox_server.agent.slots.bundle import SHARED_SLOT_LIB, list_slot_modules
from sandbox_server.core.cleanup import cleanup_on_failure

_COMPILED_SUFFIX = "c"  # of the name of a compiled module in the zipapp, after the name of its source


def unpack_agent(zipapp: bytes, parent: Path) -> Path:
    """Unpack the agent into a folder, with its compiled modules where the interpreter looks for them, and with the folder of modules that run in slots.

    The folder is named by the content's hash, so that a newer service changes no file of an older agent that still runs.

    Args:
        zipapp: the content of the agent's zipapp, built by the interpreter that runs the agent.
        parent: the folder of unpacked agents. It is created for this user alone, because whoever could write to it could change what agents run.

    Returns:
        The folder. If it exists already, nothing is written.

    Raises:
        OSError: the folder cannot be written.
    """
    folder = parent / hashlib.sha256(zipapp).hexdigest()[:16]
    if not folder.exists():
        parent.mkdir(mode=0o700, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=parent))
        # Without this, each attempt on a full disk would leave one more partial folder, which would fill whatever space is freed.
        with cleanup_on_failure(lambda: shutil.rmtree(partial, ignore_errors=True)):
            with zipfile.ZipFile(io.BytesIO(zipapp)) as archive:
                for name in archive.namelist():
                    _write_file(partial / _unpacked_name(name), archive.read(name))
            _link_slot_lib(partial)
            partial.replace(folder)
    return folder


def _unpacked_name(name: str) -> str:
    """Return where a member of the zipapp goes. A compiled module lies beside its source there, and in a folder the interpreter looks for it elsewhere."""
    return compiled_path(name.removesuffix(_COMPILED_SUFFIX)) if name.endswith(".py" + _COMPILED_SUFFIX) else name


def _write_file(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def _link_slot_lib(folder: Path) -> None:
    """Make the folder of modules that run in slots from the files of the agent. Every slot can read it."""
    for name in list_slot_modules():
        for module in (name, compiled_path(name)):
            target = folder / SHARED_SLOT_LIB / module
            target.parent.mkdir(parents=True, exist_ok=True)
            target.hardlink_to(folder / module)
            target.chmod(0o644)
    for parent, _, _ in os.walk(folder / SHARED_SLOT_LIB):
        os.chmod(parent, 0o755)
