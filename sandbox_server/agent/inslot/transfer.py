"""The file routes: one file out, one file in, the names in a folder. Each is confined to the roots of its slot."""

from __future__ import annotations

import os
import stat

from sandbox_server.agent.inslot.atomic import Replacement
from sandbox_server.agent.inslot.confine import CHUNK_BYTES, Confined, Refusal, not_regular, show
from sandbox_server.agent.inslot.files import FOLDER_OPEN_FLAGS, copy_out
from sandbox_server.agent.inslot.reply import BrokenOff, encode, name_fields
from sandbox_server.agent.inslot.walk import walk

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Mapping

    from sandbox_server.agent.inslot.reply import Reply

DEFAULT_ENTRIES = 10_000
MAX_LIST_BYTES = 7 << 20  # of JSON, below what the agent takes as a header: deep trees have long paths


def route_get(args: Mapping[str, Any], ctx: Mapping[str, Any], reply: Reply) -> None:
    """A file's bytes: exactly `size_bytes` of them, or the answer breaks off."""
    fd, info = Confined(args["path"], ctx).open_regular()
    try:
        reply.ok(size_bytes=info.st_size, mode=octal(info.st_mode), mtime=info.st_mtime)
        if copy_out(fd, reply, 0, info.st_size) < info.st_size:
            raise BrokenOff("the file shrank while it was read")
    finally:
        os.close(fd)


def route_put(args: Mapping[str, Any], ctx: Mapping[str, Any], reply: Reply, in_fd: int) -> None:
    """A file from the bytes of `in_fd` up to its end; it is there only when all of them are."""
    place = Confined(args["path"], ctx)
    folder_fd, name = place.open_parent()
    try:
        _replaceable(place, folder_fd, name)
        with Replacement(folder_fd, name, _mode(args.get("mode"))) as new:
            size_bytes = 0
            while True:
                data = os.read(in_fd, CHUNK_BYTES)
                if not data:
                    break
                new.write(data)
                size_bytes += len(data)
            promised = args.get("size_bytes")
            if promised is not None and promised != size_bytes:
                raise Refusal("invalid", f"{int(promised)} bytes were announced for {show(args['path'])} and {int(size_bytes)} came: it was not written")
            place.verify(folder_fd)
            new.commit()
    finally:
        os.close(folder_fd)
    reply.ok(size_bytes=size_bytes)


def _mode(asked: str | int | None) -> int:
    if asked is None:
        return 0o644
    return int(asked, 8) if isinstance(asked, str) else asked


def _replaceable(place: Confined, folder_fd: int, name: str) -> None:
    try:
        mode = os.stat(name, dir_fd=folder_fd, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        raise not_regular(place.asked, mode)


def route_list(args: Mapping[str, Any], ctx: Mapping[str, Any], reply: Reply) -> None:
    """The entries of a folder, each with its absolute path."""
    place = Confined(args["path"], ctx)
    most = args.get("max_entries") or DEFAULT_ENTRIES
    entries: list[dict[str, Any]] = []
    unreadable: list[str] = []
    truncated, size_bytes = False, 0
    top = place.open(FOLDER_OPEN_FLAGS)
    try:
        for entry in walk(top, bool(args.get("recursive")), lambda path, error: unreadable.append(path), most + 1):
            described = describe(f"{place.real.rstrip('/')}/{entry.path}", entry.info)
            size_bytes += len(encode(described)) + 1
            if len(entries) == most or size_bytes > MAX_LIST_BYTES:
                truncated = True
                break
            entries.append(described)
    finally:
        os.close(top)
    reply.ok(entries=entries, truncated=truncated, unreadable=len(unreadable))


def describe(path: str, info: os.stat_result) -> dict[str, Any]:
    """One entry of a listing."""
    kind = "file" if stat.S_ISREG(info.st_mode) else "directory" if stat.S_ISDIR(info.st_mode) else "symlink" if stat.S_ISLNK(info.st_mode) else "other"
    return dict(name_fields(path), type=kind, size_bytes=info.st_size, mode=octal(info.st_mode), mtime=info.st_mtime)


def octal(mode: int) -> str:
    """Permission bits the way chmod and the PUT route take them: 0644."""
    return f"{stat.S_IMODE(mode):04o}"
