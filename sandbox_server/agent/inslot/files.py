"""The file tools `read_file`, `write_file`, `edit_file` and `list_files`. They accept every path that the slot can see, and work on bytes."""

from __future__ import annotations

import errno
import os
import stat

from sandbox_server.agent.inslot.atomic import Replacement
from sandbox_server.agent.inslot.confine import (
    CHUNK_BYTES,
    Refusal,
    open_folder_below,
    open_regular,
    quote_path,
    refusal_for_os_error,
    refusal_not_regular,
    resolve_symlinks,
    resolve_tool_path,
)
from sandbox_server.agent.inslot.walk import walk

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Mapping

    from sandbox_server.agent.inslot.reply import Reply

MAX_EDIT_BYTES = 16 << 20
DEFAULT_ENTRIES = 1_000
FOLDER_OPEN_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK | os.O_CLOEXEC


def read_file(args: Mapping[str, Any], ctx: Mapping[str, Any], reply: Reply) -> None:
    """Reply with the content of a file: all of it, or at max_entries `limit` lines after the first `offset` lines."""
    path = resolve_tool_path(args["path"], ctx)
    fd, info = open_regular(path, path)
    try:
        skip, limit = args.get("offset") or 0, args.get("limit")
        start, skipped = _find_end_of_lines(fd, 0, skip)
        if skipped < skip or (skip and not os.pread(fd, 1, start)):
            raise Refusal("file_error", f"{quote_path(path)} has {int(skipped)} lines, so there is nothing after the first {int(skip)}")
        if limit is None:
            reply.send_ok(size_bytes=info.st_size, more=False)
            copy_out(fd, reply, start, None)
            return
        end, _ = _find_end_of_lines(fd, start, limit)
        reply.send_ok(size_bytes=info.st_size, more=bool(os.pread(fd, 1, end)))
        copy_out(fd, reply, start, end)
    finally:
        os.close(fd)


def _find_end_of_lines(fd: int, at: int, count: int) -> tuple[int, int]:
    """Find the end of `count` lines.

    Args:
        fd: descriptor of the file.
        at: the offset in bytes at which the first line begins.
        count: the number of lines to skip.

    Returns:
        The offset in bytes after the lines, and how many lines the file really has there. The last one may lack its newline.
    """
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
    """Write a range of a file as content of the reply.

    Args:
        fd: descriptor of the file.
        reply: where the content goes.
        start: the offset of the first byte.
        end: the offset after the last byte; None means the end of the file.

    Returns:
        The number of bytes written.
    """
    at = _send_from_cache(fd, reply, start, end) if end is not None and end - start > CHUNK_BYTES else start
    while end is None or at < end:
        data = os.pread(fd, CHUNK_BYTES if end is None else min(CHUNK_BYTES, end - at), at)
        if not data:
            break
        reply.write_content(data)
        at += len(data)
    return at - start


def _send_from_cache(fd: int, reply: Reply, start: int, end: int) -> int:
    """Write a range of a file as content of the reply without copying it, as far as the file system can do so. Returns the offset of what is left."""
    at = start
    try:
        while at < end:
            sent = reply.send_file_content(fd, at, end - at)
            if not sent:
                break
            at += sent
    except OSError:
        pass  # The file system cannot do it, or cannot read: `pread` then reports the reason.
    return at


def write_file(args: Mapping[str, Any], ctx: Mapping[str, Any], reply: Reply) -> None:
    """Replace or create a file. Symlinks are followed, and missing parent folders are created."""
    path = resolve_tool_path(args["path"], ctx)
    data = args["content"].encode("utf-8", "surrogateescape")
    real, before = _resolve_write_target(path)
    mode = int(args["mode"], 8) if args.get("mode") else stat.S_IMODE(before.st_mode) & 0o777 if before else 0o644
    _write_atomically(real, data, mode)
    verb = "wrote" if before else "made"
    reply.send_text(f"{verb} {quote_path(path)} ({count_with_noun(len(data), 'byte')})\n", size_bytes=len(data), created=before is None)


def _resolve_write_target(path: str) -> tuple[str, os.stat_result | None]:
    """Resolve the path of a file that is to be written.

    Returns:
        The resolved path, and the `lstat` result of the existing file, or None if there is no file yet.

    Raises:
        Refusal: the path is not a regular file, or the file is write-protected.
        OSError: the path cannot be resolved, or the file is on a read-only mount.
    """
    real = resolve_symlinks(path)
    try:
        info = os.lstat(real)
    except FileNotFoundError:
        if path.endswith("/"):
            raise OSError(errno.EISDIR, "", path) from None
        return real, None
    if not stat.S_ISREG(info.st_mode):
        raise refusal_not_regular(path, info.st_mode)
    # `rename` checks the permissions of the folder only. A file that was made read-only must not be replaced.
    if not os.access(real, os.W_OK, effective_ids=True):
        if os.statvfs(real).f_flag & os.ST_RDONLY:
            raise OSError(errno.EROFS, "", path)  # A change of its mode would be refused as well.
        raise Refusal("file_error", f"{quote_path(path)} is write-protected (mode {stat.S_IMODE(info.st_mode):04o}): chmod it first", "EACCES")
    return real, info


def _write_atomically(real: str, data: bytes, mode: int) -> None:
    folder, _, name = real.rpartition("/")
    folder_fd = open_folder_below("/", folder)
    try:
        with Replacement(folder_fd, name, mode) as new:
            new.write(data)
            new.commit()
    finally:
        os.close(folder_fd)


def edit_file(args: Mapping[str, Any], ctx: Mapping[str, Any], reply: Reply) -> None:
    """Replace a text in a file. The text must occur in the file, and only once unless `replace_all` is set."""
    path = resolve_tool_path(args["path"], ctx)
    fd, before = open_regular(path, path)
    try:
        data = _read_at_most(fd, MAX_EDIT_BYTES + 1, before.st_size + 1)
    finally:
        os.close(fd)
    if len(data) > MAX_EDIT_BYTES:
        raise Refusal("file_error", f"{quote_path(path)} is larger than {int(MAX_EDIT_BYTES)} bytes: edit it with sed or a script", "EFBIG")
    real, _ = _resolve_write_target(path)
    old, new = (args[name].encode("utf-8", "surrogateescape") for name in ("old", "new"))
    if b"\r\n" in data and data.count(b"\n") == data.count(b"\r\n"):
        # Every line of the file ends in CRLF. The caller does not need to know that.
        old, new = (text.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n") for text in (old, new))
    at = data.find(old)
    if at < 0:
        raise Refusal("file_error", f"old was found 0 times in {quote_path(path)}: read the file and copy the text exactly, white space included")
    lines = _find_line_numbers(data, old)
    if not args.get("replace_all") and data.find(old, at + 1) >= 0:
        detail = "old was found %d times in %s (lines %s), so it does not say which one is meant: give more of the text around it, or set replace_all"
        raise Refusal("file_error", detail % (max(2, data.count(old)), quote_path(path), lines))
    _check_unchanged(real, before, path)
    count = data.count(old)
    _write_atomically(real, data.replace(old, new), stat.S_IMODE(before.st_mode) & 0o777)
    reply.send_text(f"replaced {count_with_noun(count, 'occurrence')} in {quote_path(path)} (line {lines})\n", replacements=count)


def _read_at_most(fd: int, most_bytes: int, expected_bytes: int) -> bytes:
    """Read a file from its start.

    Args:
        fd: descriptor of the file.
        most_bytes: how much is read at most.
        expected_bytes: how much is asked for at once, which should be a little more than the file has.
    """
    parts = []
    left_bytes = most_bytes
    while left_bytes:
        part = os.read(fd, min(left_bytes, max(expected_bytes, CHUNK_BYTES)))
        if not part:
            break
        parts.append(part)
        left_bytes -= len(part)
    return b"".join(parts)


def _find_line_numbers(data: bytes, old: bytes) -> str:
    """Return the line numbers of the first five occurrences as text, including overlapping ones."""
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


def _check_unchanged(real: str, before: os.stat_result, path: str) -> None:
    now = os.lstat(real)
    if (now.st_ino, now.st_size, now.st_mtime_ns) != (before.st_ino, before.st_size, before.st_mtime_ns):
        raise Refusal("file_error", f"{quote_path(path)} was changed by something else while it was edited: read it again", "ESTALE")


def count_with_noun(count: int, noun: str) -> str:
    """Return a number with its noun in the singular or plural, such as `1 file` or `2 files`."""
    return f"{int(count)} {noun}{'' if count == 1 else 's' if not noun.endswith('ch') else 'es'}"


def list_files(args: Mapping[str, Any], ctx: Mapping[str, Any], reply: Reply) -> None:
    """List a folder, one entry per line. A folder ends in a slash, and a symlink is followed by its target."""
    path = resolve_tool_path(args.get("path"), ctx)
    max_entries = args.get("max_entries") or DEFAULT_ENTRIES
    lines: list[str] = []
    unreadable: list[str] = []
    cut = False
    top = os.open(path, FOLDER_OPEN_FLAGS)
    try:
        for entry in walk(top, bool(args.get("recursive")), lambda name, error: unreadable.append(_describe_error(name, error)), max_entries + 1):
            if len(lines) == max_entries:
                cut = True
                break
            lines.append(_describe_entry(entry.path, entry.info.st_mode, entry.name, entry.folder_fd))
    finally:
        os.close(top)
    notes = [f"[{note}]" for note in unreadable[:20]]
    if cut:
        notes.append(f"[cut after {count_with_noun(len(lines), 'line')}: there are more; list a folder below, or raise max_entries]")
    elif not lines:
        notes.append(f"[{quote_path(path)} is empty]")
    reply.send_text("".join(f"{line}\n" for line in lines + notes), entries=len(lines), truncated=cut, unreadable=len(unreadable))


def _describe_error(path: str, error: OSError) -> str:
    return refusal_for_os_error(error, path).detail


def _describe_entry(path: str, mode: int, name: str, folder_fd: int) -> str:
    if stat.S_ISDIR(mode):
        return f"{quote_path(path)}/"
    if stat.S_ISLNK(mode):
        return f"{quote_path(path)} -> {link_target(name, folder_fd)}"
    return quote_path(path)


def link_target(name: str, folder_fd: int) -> str:
    """Return the target of a symlink for a line of text, or `?` if the symlink no longer exists."""
    try:
        return quote_path(os.readlink(name, dir_fd=folder_fd))
    except OSError:
        return "?"
