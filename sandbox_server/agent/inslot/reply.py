"""The reply of an operation inside a slot: one header, then raw bytes.

The header is a length in bytes (u32, network order) and a JSON object of that length: `{"ok": true, ...}`, or `{"ok": false, "code", "detail", "errno"}`.
It contains no unpaired surrogates, so that every JSON encoder can encode it again. A name that is not UTF-8 is shown with U+FFFD; its bytes follow in base64.
"""

from __future__ import annotations

import _socket as socket
import os
import struct

# The part of `json` that is written in C. Importing the whole module would double the time of a small read.
from _json import encode_basestring_ascii
from binascii import b2a_base64

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from sandbox_server.agent.inslot.confine import Refusal

LENGTH = struct.Struct(">I")
_DESCRIPTOR = struct.Struct("i")


class IncompleteReply(Exception):
    """The reply cannot be completed: its reader has closed the pipe, or the file that it is made from has changed."""


class Reply:
    """Writes the reply of one operation to a pipe.

    Args:
        out_fd: descriptor of the pipe.

    Attributes:
        started: whether the header has been written. Afterwards an error can no longer be reported in it.
    """

    def __init__(self, out_fd: int) -> None:
        self._fd = out_fd
        self.started = False

    def send_ok(self, **meta: Any) -> None:
        """Write the header of a successful operation. Content may follow."""
        self._header(dict(meta, ok=True))

    def send_ok_with_descriptor(self, fd: int) -> None:
        """Write the header of a successful operation together with a duplicate of a descriptor. The reply must go to a unix socket."""
        sock = socket.socket(fileno=self._fd)
        try:
            self.started = True
            sock.sendmsg([_header_bytes({"ok": True})], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _DESCRIPTOR.pack(fd))])
        except BrokenPipeError as error:
            raise IncompleteReply(str(error)) from None
        finally:
            sock.detach()

    def send_refusal(self, refusal: Refusal) -> None:
        """Write the header of an operation that was refused or has failed."""
        meta = {"ok": False, "code": refusal.code, "detail": refusal.detail}
        if refusal.errno_name is not None:
            meta["errno"] = refusal.errno_name
        self._header(meta)

    def send_text(self, text: str, **meta: Any) -> None:
        """Write a whole reply that consists of text. Bytes that are not UTF-8 (surrogates in `text`) are written unchanged."""
        self.send_ok(**meta)
        self.write_content(text.encode("utf-8", "surrogateescape"))

    def write_content(self, data: bytes) -> None:
        """Write all bytes of `data` as content.

        Raises:
            IncompleteReply: the reader has closed the pipe.
        """
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            raise IncompleteReply(str(error)) from None

    def send_file_content(self, fd: int, offset: int, size_bytes: int) -> int:
        """Write a part of a file as content. The kernel passes its pages to the pipe without a copy.

        Args:
            fd: descriptor of the file.
            offset: where the part begins.
            size_bytes: how long it is at most.

        Returns:
            The number of bytes written; 0 at the end of the file.

        Raises:
            IncompleteReply: the reader has closed the pipe.
            OSError: the file cannot be read, or not in this way.
        """
        try:
            return os.sendfile(self._fd, fd, offset, size_bytes)
        except BrokenPipeError as error:
            raise IncompleteReply(str(error)) from None

    def _header(self, meta: dict[str, Any]) -> None:
        self.started = True
        self.write_content(_header_bytes(meta))


def _header_bytes(meta: dict[str, Any]) -> bytes:
    document = encode_json(meta).encode()
    return LENGTH.pack(len(document)) + document


def encode_json(value: Any) -> str:
    """Return a value as JSON: an object, list, string, finite number, boolean or null."""
    if isinstance(value, str):
        return str(encode_basestring_ascii(value))
    if isinstance(value, dict):
        return "{" + ",".join(f"{encode_json(key)}:{encode_json(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return f"[{','.join(map(encode_json, value))}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value)


def name_fields(path: str) -> dict[str, str]:
    """Return the JSON fields of a path: `path`, and `path_base64` if the path is not UTF-8."""
    raw = path.encode("utf-8", "surrogateescape")
    try:
        return {"path": raw.decode()}
    except UnicodeDecodeError:
        return {"path": raw.decode("utf-8", "replace"), "path_base64": b2a_base64(raw, newline=False).decode()}
