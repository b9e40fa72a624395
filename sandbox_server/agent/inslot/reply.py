"""How a slot-side operation answers: one header, then raw bytes.

The header is a length (u32, network order) and that much JSON: `{"ok": true, ...}`, or `{"ok": false, "code", "detail", "errno"}`.
It holds no lone surrogates, so every JSON encoder takes it on: names that are not UTF-8 show U+FFFD, their bytes are beside them in base64.
"""

from __future__ import annotations

import os
import struct

# The part of json that is written in C: the whole would double the time a small read takes.
from _json import encode_basestring_ascii
from binascii import b2a_base64

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from sandbox_server.agent.inslot.confine import Refusal

LENGTH = struct.Struct(">I")


class BrokenOff(Exception):
    """The answer cannot be brought to its end: nobody reads it any more, or what it was made from changed under it."""


class Reply:
    """The answer of one operation on a pipe. `started`: whether the header is out, so that an error can no longer be told in it."""

    def __init__(self, out_fd: int) -> None:
        self._fd = out_fd
        self.started = False

    def ok(self, **meta: Any) -> None:
        """The operation was done, or its content follows."""
        self._header(dict(meta, ok=True))

    def fail(self, refusal: Refusal) -> None:
        """The operation was not done."""
        meta = {"ok": False, "code": refusal.code, "detail": refusal.detail}
        if refusal.errno_name is not None:
            meta["errno"] = refusal.errno_name
        self._header(meta)

    def text(self, text: str, **meta: Any) -> None:
        """A whole answer of text; bytes that are not UTF-8 come out as they went in."""
        self.ok(**meta)
        self.write(text.encode("utf-8", "surrogateescape"))

    def write(self, data: bytes) -> None:
        """Content, all of it.

        Raises:
            BrokenOff: the other end is closed.
        """
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            raise BrokenOff(str(error)) from None

    def _header(self, meta: dict[str, Any]) -> None:
        document = encode(meta).encode()
        self.started = True
        self.write(LENGTH.pack(len(document)) + document)


def encode(value: Any) -> str:
    """JSON of what headers are made of: objects, lists, strings, finite numbers, booleans, null."""
    if isinstance(value, str):
        return str(encode_basestring_ascii(value))
    if isinstance(value, dict):
        return "{" + ",".join(f"{encode(key)}:{encode(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return f"[{','.join(map(encode, value))}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value)


def name_fields(path: str) -> dict[str, str]:
    """A path as JSON fields: `path`, and `path_base64` where the path is not UTF-8."""
    raw = path.encode("utf-8", "surrogateescape")
    try:
        return {"path": raw.decode()}
    except UnicodeDecodeError:
        return {"path": raw.decode("utf-8", "replace"), "path_base64": b2a_base64(raw, newline=False).decode()}
