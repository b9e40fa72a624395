"""Compiled modules whose bytes depend on their source and the interpreter alone."""

from __future__ import annotations

import importlib.util
import marshal
import struct

_UNCHECKED_HASH = struct.pack("<I", 1)
_NO_REFERENCES = 2  # the last version of the format whose bytes do not depend on who else holds an object


def compiled(name: str, source: bytes) -> bytes:
    """A module as a `.pyc` for the running interpreter, which never looks whether the source has changed."""
    code = compile(source, name, "exec", dont_inherit=True)
    return importlib.util.MAGIC_NUMBER + _UNCHECKED_HASH + importlib.util.source_hash(source) + marshal.dumps(code, _NO_REFERENCES)
