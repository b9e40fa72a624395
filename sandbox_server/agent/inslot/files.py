"""The file tools that touch one file or name what is in a folder. They take any path the slot sees, and work on bytes."""

from __future__ import annotations

import errno
import os
import stat

from sandbox_server.agent.inslot.atomic import Replacement
from sandbox_server.agent.inslot.confine import CHUNK_BYTES, Refusal, descend, follow, not_regular, open_regular, refusal_of, show, tool_path
from sandbox_server.agent.inslot.walk import walk

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Mapping

    from sandbox_server.agent.inslot.reply import Reply

MAX_EDIT_BYTES = 16 << 20
DEFAULT_ENTRIES = 1_000
FOLDER_OPEN_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK | os.O_CLOEXEC


def read_file(args: Mapping[str, Any], ctx: Mapping[str, Any], reply: Reply) -> None:
    """The content of a file as it is, or `limit` lines of it after the first `offset`."""
    path = tool_path(args["path"], ctx)
    fd, info = open_regular(path, path)
    try:
        skip, limit = args.get("offset") or 0, args.get("limit")
        start, skipped = _after_lines(fd, 0, skip)
        if skipped < skip or (skip and not os.pread(fd, 1, start)):
            raise Refusal("file_error", f"{show(path)} has {int(skipped)} lines, so there is nothing after the first {int(skip)}")
        if limit is None:
            reply.ok(size_bytes=info.st_size, more=False)
            copy_out(fd, reply, start, None)
            return
        end, _ = _after_lines(fd, start, limit)
        reply.ok(size_bytes=info.st_size, more=bool(os.pread(fd, 1, end)))
        copy_out(fd, reply, start, end)
    finally:
        os.close(fd)


def _after_lines(fd: int, at: int, count: int) -> tuple[int, int]:
    """Where `count` lines from the offset `at` on end, and how many there really were; the last one may lack its newline."""
    left, open_line = count, False
    while left:
        data = os.pread(fd, CHUNK_BYTES, at)
        if not data:
            return at, count - left + open_line
        found = data.count(b"\n")
        if found >= left:
            end = -1
            for _ in range(left):
                end = data.index(b"\n", end + 1)
            return at + end + 1, count
        left -= found
        at += len(data)
        open_line = not data.endswith(b"\n")
    return at, count


def copy_out(fd: int, reply: Reply, start: int, end: int | None) -> int:
    """Write the bytes from `start` to `end` (None: all there are) as content and return how many there were."""
    at = start
    while end is None or at < end:
        data = os.pread(fd, CHUNK_BYTES if end is None else min(CHUNK_BYTES, end - at), at)
        if not data:
            break
        reply.write(data)
        at += len(data)
    return at - start


def write_file(args: Mapping[str, Any], ctx: Mapping[str, Any], reply: Reply) -> None:
    """Put content in the place of a file, through symlinks, making the folders above it."""
    path = tool_path(args["path"], ctx)
    data = args["content"].encode("utf-8", "surrogateescape")
    real, before = _target(path)
    mode = int(args["mode"], 8) if args.get("mode") else stat.S_IMODE(before.st_mode) & 0o777 if before else 0o644
    _replace(real, data, mode)
    verb = "wrote" if before else "made"
    reply.text(f"{verb} {show(path)} ({count_of(len(data), 'byte')})\n", size_bytes=len(data), created=before is None)


def _target(path: str) -> tuple[str, os.stat_result | None]:
    """Where writing to a path goes, and what is there.

    Raises:
        Refusal: something that is no regular file is there, or it may not be written.
        OSError: the path cannot be followed.
    """
    real = follow(path)
    try:
        info = os.lstat(real)
    except FileNotFoundError:
        if path.endswith("/"):
            raise OSError(errno.EISDIR, "", path) from None
        return real, None
    if not stat.S_ISREG(info.st_mode):
        raise not_regular(path, info.st_mode)
    # The rename asks the folder only; a file that was made read-only is to stay as it is.
    if not os.access(real, os.W_OK, effective_ids=True):
        raise Refusal("file_error", f"{show(path)} is write-protected (mode {stat.S_IMODE(info.st_mode):04o}): chmod it first", "EACCES")
    return real, info


def _replace(real: str, data: bytes, mode: int) -> None:
    folder, _, name = real.rpartition("/")
    folder_fd = descend("/", folder)
    try:
        with Replacement(folder_fd, name, mode) as new:
            new.write(data)
            new.commit()
    finally:
        os.close(folder_fd)


def edit_file(args: Mapping[str, Any], ctx: Mapping[str, Any], reply: Reply) -> None:
    """Replace one text by another; it must be there, and only once unless `replace_all` is set."""
    path = tool_path(args["path"], ctx)
    fd, before = open_regular(path, path)
    with open(fd, "rb") as file:
        data = file.read(MAX_EDIT_BYTES + 1)
    if len(data) > MAX_EDIT_BYTES:
        raise Refusal("file_error", f"{show(path)} is larger than {int(MAX_EDIT_BYTES)} bytes: edit it with sed or a script", "EFBIG")
    real, _ = _target(path)
    old, new = (args[name].encode("utf-8", "surrogateescape") for name in ("old", "new"))
    if b"\r\n" in data and data.count(b"\n") == data.count(b"\r\n"):
        # Every line ends in CRLF, which whoever wrote the arguments need not know.
        old, new = (text.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n") for text in (old, new))
    at = data.find(old)
    if at < 0:
        raise Refusal("file_error", f"old was found 0 times in {show(path)}: read the file and copy the text exactly, white space included")
    lines = _lines_of(data, old)
    if not args.get("replace_all") and data.find(old, at + 1) >= 0:
        detail = "old was found %d times in %s (lines %s), so it does not say which one is meant: give more of the text around it, or set replace_all"
        raise Refusal("file_error", detail % (max(2, data.count(old)), show(path), lines))
    _unchanged(real, before, path)
    count = data.count(old)
    _replace(real, data.replace(old, new), stat.S_IMODE(before.st_mode) & 0o777)
    reply.text(f"replaced {count_of(count, 'occurrence')} in {show(path)} (line {lines})\n", replacements=count)


def _lines_of(data: bytes, old: bytes) -> str:
    """The line numbers of the first few occurrences, overlapping ones too."""
    lines: list[str] = []
    at, line, counted = data.find(old), 1, 0
    while at >= 0:
        if len(lines) == 5:
            return f"{', '.join(lines)} ..."
        line += data.count(b"\n", counted, at)
        counted = at
        lines.append(str(line))
        at = data.find(old, at + 1)
    return ", ".join(lines)


def _unchanged(real: str, before: os.stat_result, path: str) -> None:
    now = os.lstat(real)
    if (now.st_ino, now.st_size, now.st_mtime_ns) != (before.st_ino, before.st_size, before.st_mtime_ns):
        raise Refusal("file_error", f"{show(path)} was changed by something else while it was edited: read it again", "ESTALE")


def count_of(count: int, noun: str) -> str:
    """`1 file`, `2 files`."""
    return f"{int(count)} {noun}{'' if count == 1 else 's' if not noun.endswith('ch') else 'es'}"


def list_files(args: Mapping[str, Any], ctx: Mapping[str, Any], reply: Reply) -> None:
    """What is in a folder, a line each, folders with a slash, symlinks with where they point."""
    path = tool_path(args.get("path"), ctx)
    most = args.get("max_entries") or DEFAULT_ENTRIES
    lines: list[str] = []
    unreadable: list[str] = []
    cut = False
    top = os.open(path, FOLDER_OPEN_FLAGS)
    try:
        for entry in walk(top, bool(args.get("recursive")), lambda name, error: unreadable.append(_unreadable(name, error)), most + 1):
            if len(lines) == most:
                cut = True
                break
            lines.append(_line(entry.path, entry.info.st_mode, entry.name, entry.folder_fd))
    finally:
        os.close(top)
    notes = [f"[{note}]" for note in unreadable[:20]]
    if cut:
        notes.append(f"[cut after {count_of(len(lines), 'line')}: there are more; list a folder below, or raise max_entries]")
    elif not lines:
        notes.append(f"[{show(path)} is empty]")
    reply.text("".join(f"{line}\n" for line in lines + notes), entries=len(lines), truncated=cut, unreadable=len(unreadable))


def _unreadable(path: str, error: OSError) -> str:
    return refusal_of(error, path).detail


def _line(path: str, mode: int, name: str, folder_fd: int) -> str:
    if stat.S_ISDIR(mode):
        return f"{show(path)}/"
    if stat.S_ISLNK(mode):
        return f"{show(path)} -> {link_target(name, folder_fd)}"
    return show(path)


def link_target(name: str, folder_fd: int) -> str:
    """Where a symlink points, for a line of text; `?` when it is gone."""
    try:
        return show(os.readlink(name, dir_fd=folder_fd))
    except OSError:
        return "?"
