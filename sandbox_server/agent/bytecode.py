"""Compiles modules to bytes that depend only on their source and on the interpreter."""

from __future__ import annotations

import importlib.util
import marshal
import os
import struct
import sys

_UNCHECKED_HASH = struct.pack("<I", 1)
_NO_REFERENCES = 2  # the last version of the marshal format whose bytes do not depend on the reference counts of objects


def compiled(name: str, source: bytes) -> bytes:
    """Compile a module.

    Args:
        name: the file name that tracebacks show.
        source: the source of the module.

    Returns:
        The content of a `.pyc` file for the running interpreter. The interpreter does not compare it with the source file.
    """
    code = compile(source, name, "exec", dont_inherit=True)
    return importlib.util.MAGIC_NUMBER + _UNCHECKED_HASH + importlib.util.source_hash(source) + marshal.dumps(code, _NO_REFERENCES)


def compiled_path(path: str) -> str:
    """Return where this interpreter looks for the compiled module of a source file in a folder, if it was not told to keep compiled modules elsewhere.

    Args:
        path: the source file.
    """
    folder, name = os.path.split(path)
    return os.path.join(folder, "__pycache__", "%s.%s.pyc" % (name[: -len(".py")], sys.implementation.cache_tag))
