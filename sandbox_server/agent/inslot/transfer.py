"""The file routes `route_get`, `route_put` and `route_list`. Each one only accesses files inside the roots of its slot."""

from __future__ import annotations

import os
import stat

from sandbox_server.agent.inslot.atomic import Replacement
from sandbox_server.agent.inslot.confine import ConfinedPath, Refusal, quote_path, refusal_not_regular
from sandbox_server.agent.inslot.files import FOLDER_OPEN_FLAGS, copy_out
from sandbox_server.agent.inslot.reply import IncompleteReply, encode_json, name_fields
from sandbox_server.agent.inslot.walk import walk

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Mapping

    from sandbox_server.agent.inslot.reply import Reply

DEFAULT_LISTED = 10_000
READ_BYTES = 128 << 10
MAX_LIST_BYTES = 7 << 20  # Of JSON. It must stay below the longest header that the agent accepts, and deep trees have long paths.


def route_get(args: Mapping[str, Any], ctx: Mapping[str, Any], reply: Reply) -> None:
    """Reply with the content of a file. It has exactly the `size_bytes` of the header, or the reply is incomplete."""
    fd, info = ConfinedPath(args["path"], ctx).open_regular()
    try:
        reply.send_ok(size_bytes=info.st_size, mode=format_mode(info.st_mode), mtime=info.st_mtime)
        if copy_out(fd, reply, 0, info.st_size) < info.st_size:
            raise IncompleteReply("the file shrank while it was read")
    finally:
        os.close(fd)


def route_put(args: Mapping[str, Any], ctx: Mapping[str, Any], reply: Reply, in_fd: int) -> None:
    """Write a file from the bytes that are read from `in_fd` until its end. The file appears only when it is complete."""
    confined = ConfinedPath(args["path"], ctx)
    folder_fd, name = confined.open_parent()
    try:
        _check_replaceable(confined, folder_fd, name)
        with Replacement(folder_fd, name, _parse_mode(args.get("mode"))) as new:
            size_bytes = _copy_in(in_fd, new)
            announced_bytes = args.get("size_bytes")
            if announced_bytes is not None and announced_bytes != size_bytes:
                detail = "%d bytes were announced for %s, but %d bytes arrived: the file was not written"
                raise Refusal("invalid", detail % (announced_bytes, quote_path(args["path"]), size_bytes))
            confined.verify(folder_fd)
            new.commit()
    finally:
        os.close(folder_fd)
    reply.send_ok(size_bytes=size_bytes)


def _copy_in(in_fd: int, new: Replacement) -> int:
    """Write everything that can be read from a descriptor. Returns how many bytes that was."""
    size_bytes = 0
    buffer = bytearray(READ_BYTES)
    view = memoryview(buffer)
    while True:
        read_bytes = os.readv(in_fd, [buffer])
        if not read_bytes:
            return size_bytes
        new.write(view[:read_bytes])
        size_bytes += read_bytes


def _parse_mode(asked: str | int | None) -> int:
    if asked is None:
        return 0o644
    return int(asked, 8) if isinstance(asked, str) else asked


def _check_replaceable(confined: ConfinedPath, folder_fd: int, name: str) -> None:
    try:
        mode = os.stat(name, dir_fd=folder_fd, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        raise refusal_not_regular(confined.asked, mode)


def route_list(args: Mapping[str, Any], ctx: Mapping[str, Any], reply: Reply) -> None:
    """Reply with the entries of a folder, each with its absolute path."""
    confined = ConfinedPath(args["path"], ctx)
    max_entries = args.get("max_entries") or DEFAULT_LISTED
    entries: list[dict[str, Any]] = []
    unreadable: list[str] = []
    truncated, size_bytes = False, 0
    top = confined.open(FOLDER_OPEN_FLAGS)
    try:
        for entry in walk(top, bool(args.get("recursive")), lambda path, error: unreadable.append(path), max_entries + 1):
            described = describe_entry(f"{confined.real.rstrip('/')}/{entry.path}", entry.info)
            size_bytes += len(encode_json(described)) + 1
            if len(entries) == max_entries or size_bytes > MAX_LIST_BYTES:
                truncated = True
                break
            entries.append(described)
    finally:
        os.close(top)
    reply.send_ok(entries=entries, truncated=truncated, unreadable=len(unreadable))


def describe_entry(path: str, info: os.stat_result) -> dict[str, Any]:
    """Return the JSON fields of one entry of a listing."""
    kind = "file" if stat.S_ISREG(info.st_mode) else "directory" if stat.S_ISDIR(info.st_mode) else "symlink" if stat.S_ISLNK(info.st_mode) else "other"
    return dict(name_fields(path), type=kind, size_bytes=info.st_size, mode=format_mode(info.st_mode), mtime=info.st_mtime)


def format_mode(mode: int) -> str:
    """Return permission bits in the form that `chmod` and the PUT route accept, such as 0644."""
    return f"{stat.S_IMODE(mode):04o}"
