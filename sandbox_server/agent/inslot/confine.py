"""Paths that a slot or a caller has chosen: resolving them, checking that a file route may access them, and opening them without blocking.

All of this runs with the rights of the slot and in its view of the file system, so a race can only harm the slot itself. A file route nevertheless checks the
opened file again, so that it never delivers a file from outside its roots.
"""

from __future__ import annotations

import errno
import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Mapping, Sequence

MAX_LINKS = 40  # The same limit as the kernel's.
READ_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
FOLDER_PATH_FLAGS = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
CHUNK_BYTES = 64 << 10


class Refusal(Exception):
    """An operation was refused or has failed. The caller receives the code and the detail.

    Args:
        code: `invalid_args`, `file_not_found`, `file_error`, `path_outside`, `port_closed`, `invalid` or `internal`.
        detail: one sentence that names the path and what the caller can do.
        errno_name: the name of the error number, such as EISDIR, if there is one.
    """

    def __init__(self, code: str, detail: str, errno_name: str | None = None) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail
        self.errno_name = errno_name


def quote_path(path: str) -> str:
    """Return a path for a line of text: unchanged if all of it is printable, else quoted in the syntax of bash ($'a\\nb')."""
    if path.isprintable():
        return path
    return f"$'{''.join(_escape(char) for char in path)}'"


def _escape(char: str) -> str:
    if char in "'\\":
        return "\\" + char
    if char.isprintable():
        return char
    named = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(char)
    return named or "".join(f"\\x{byte:02x}" for byte in os.fsencode(char))


def refusal_for_os_error(error: OSError, path: str) -> Refusal:
    """Return the refusal that describes an OSError to the caller of a file operation.

    Args:
        error: the error.
        path: the path that the operation was called with.
    """
    number = error.errno or errno.EIO
    shown = quote_path(path)
    sentence = {
        errno.ENOENT: "no such file or folder: %s",
        errno.EACCES: "permission denied: %s",
        errno.EPERM: "not permitted: %s",
        errno.EISDIR: "%s is a folder, not a file",
        errno.ENOTDIR: "%s, or a part of it, is not a folder",
        errno.ENOSPC: "no space left for %s: remove something or write less",
        errno.EDQUOT: "no space left for %s: remove something or write less",
        errno.EFBIG: "%s would be larger than a file may be here",
        errno.EROFS: "%s is read-only here: write to another place under the workspace or /tmp",
        errno.EBUSY: "%s cannot be replaced or removed: it was made read-only, or something is mounted there",
        errno.ELOOP: "%s leads through too many symlinks, or in a circle",
        errno.ENAMETOOLONG: "the path is too long: %.200s",
    }.get(number, f"{os.strerror(number).replace('%', '%%')}: %s")
    code = "file_not_found" if number == errno.ENOENT else "file_error"
    return Refusal(code, sentence % shown, errno.errorcode.get(number, "EIO"))


def refusal_not_regular(path: str, mode: int) -> Refusal:
    """Return the refusal for a path that exists but is not a regular file.

    Args:
        path: the path that the operation was called with.
        mode: the `st_mode` of the file.
    """
    if stat.S_ISDIR(mode):
        return refusal_for_os_error(OSError(errno.EISDIR, ""), path)
    kind = "a FIFO" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device" if not stat.S_ISLNK(mode) else "a symlink"
    return Refusal("file_error", f"{quote_path(path)} is {kind}, not a regular file", "EINVAL")


def resolve_tool_path(path: str | None, ctx: Mapping[str, Any]) -> str:
    """Return the absolute path for the `path` argument of a tool. A relative path starts in the workspace; `~` is the home folder."""
    if path is None:
        return str(ctx["workspace"])
    if path == "~" or path.startswith("~/"):
        return str(ctx.get("home") or ctx["workspace"]) + path[1:]
    return path if path.startswith("/") else f"{ctx['workspace']}/{path}"


def resolve_symlinks(path: str) -> str:
    """Resolve all symlinks of an absolute path. Components that do not exist yet are kept as they are written.

    Raises:
        OSError: the path goes through a file, a loop of symlinks, a folder that may not be searched, or `..` of a missing folder. The `filename` of the
            error is the part of the path that was resolved.
    """
    resolved, missing, links = "", False, 0
    pending = _reversed_components(path)
    while pending:
        name = pending.pop()
        if name == "..":
            if missing:
                raise OSError(errno.ENOENT, "", resolved or "/")
            resolved = resolved.rpartition("/")[0]
            continue
        here = f"{resolved}/{name}"
        try:
            mode = os.lstat(here).st_mode
        except FileNotFoundError:
            resolved, missing = here, True
            continue
        if stat.S_ISLNK(mode):
            links += 1
            if links > MAX_LINKS:
                raise OSError(errno.ELOOP, "", here)
            target = os.readlink(here)
            resolved = "" if target.startswith("/") else resolved
            pending += _reversed_components(target)
            continue
        if not stat.S_ISDIR(mode) and (pending or path.endswith("/")):
            raise OSError(errno.ENOTDIR, "", here)
        resolved = here
    return resolved or "/"


def _reversed_components(path: str) -> list[str]:
    return [part for part in reversed(path.split("/")) if part not in ("", ".")]


def is_inside(path: str, roots: Sequence[str]) -> bool:
    """Return whether a resolved path is one of the resolved roots or lies below one of them."""
    return any(path == root or path.startswith(f"{root.rstrip('/')}/") for root in roots)


def _refusal_outside(path: str, roots: Sequence[str]) -> Refusal:
    return Refusal("path_outside", f"{quote_path(path)} leads out of {' and '.join(roots)}: file routes stay inside")


class ConfinedPath:
    """A path of a file route that has been resolved and lies inside the roots of the slot.

    Args:
        path: the path that the caller asked for, absolute or relative to the workspace.
        ctx: the `workspace` and the `roots` of the slot.

    Raises:
        Refusal: the path leads out of the roots.
        OSError: the path cannot be resolved.
    """

    def __init__(self, path: str, ctx: Mapping[str, Any]) -> None:
        self.asked = path
        self.roots = [resolve_symlinks(root) for root in ctx["roots"]]
        self.real = self.resolve(path if path.startswith("/") else f"{ctx['workspace']}/{path}")

    def resolve(self, path: str) -> str:
        """Resolve an absolute path.

        Raises:
            Refusal: the path leads out of the roots.
            OSError: the path cannot be resolved, for a reason inside the roots.
        """
        try:
            real = resolve_symlinks(path)
        except OSError as error:
            # The caller must not learn anything about files outside the roots.
            if not is_inside(str(error.filename), self.roots):
                raise _refusal_outside(self.asked, self.roots) from None
            raise
        if not is_inside(real, self.roots):
            raise _refusal_outside(self.asked, self.roots)
        return real

    def open(self, flags: int = READ_FLAGS) -> int:
        """Open the file or folder and check that the opened one lies inside the roots.

        Raises:
            Refusal: the path has been changed meanwhile and leads out of the roots.
            OSError: the path cannot be opened.
        """
        fd = os.open(self.real, flags | os.O_NOFOLLOW)
        try:
            self.verify(fd)
        except Refusal:
            os.close(fd)
            raise
        return fd

    def verify(self, fd: int) -> None:
        """Check that an open file lies inside the roots. Where /proc is missing, only the earlier resolution of the path counts.

        Raises:
            Refusal: the file lies outside the roots.
        """
        try:
            where = os.readlink(f"/proc/self/fd/{int(fd)}")
        except OSError:
            return
        if not is_inside(where, self.roots):
            raise _refusal_outside(self.asked, self.roots)

    def open_regular(self) -> tuple[int, os.stat_result]:
        """Open a regular file for reading; see `open_regular`."""
        return open_regular(self.real, self.asked, self.open)

    def open_parent(self) -> tuple[int, str]:
        """Open the parent folder of the path and create it if it is missing.

        Returns:
            An O_PATH descriptor of the folder, and the last component of the path.

        Raises:
            OSError: a folder cannot be opened or created; EISDIR if the path is a root or ends in a slash.
        """
        if self.asked.endswith("/") or self.real in self.roots:
            raise OSError(errno.EISDIR, "")
        folder, _, name = self.real.rpartition("/")
        return self.open_folder(folder), name

    def open_folder(self, folder: str) -> int:
        """Open a resolved folder inside the roots and create the missing folders of its path. Returns an O_PATH descriptor."""
        root = next(root for root in self.roots if is_inside(folder, [root]))
        return open_folder_below(root, folder[len(root) :])


def open_regular(real: str, asked: str, opener: Callable[[], int] | None = None) -> tuple[int, os.stat_result]:
    """Open a regular file for reading.

    Anything else is refused before it is opened, because opening a FIFO or a device can have side effects.

    Args:
        real: the resolved path.
        asked: the path that the caller asked for, for error sentences.
        opener: opens the file; None means `os.open`.

    Raises:
        Refusal: the path is not a regular file.
        OSError: the file cannot be opened.
    """
    mode = os.stat(real).st_mode
    if not stat.S_ISREG(mode):
        raise refusal_not_regular(asked, mode)
    fd = opener() if opener is not None else os.open(real, READ_FLAGS)
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        os.close(fd)
        raise refusal_not_regular(asked, info.st_mode)
    return fd, info


def open_folder_below(top: str, below: str) -> int:
    """Open the folder `below` inside the resolved folder `top`, create missing folders, and follow no symlink. Returns an O_PATH descriptor."""
    fd = os.open(top, FOLDER_PATH_FLAGS)
    for name in reversed(_reversed_components(below)):
        try:
            deeper = open_subfolder(fd, name)
        finally:
            os.close(fd)
        fd = deeper
    return fd


def open_subfolder(fd: int, name: str, make: bool = True) -> int:
    """Open the folder `name` in the folder `fd`.

    Args:
        fd: descriptor of the parent folder.
        name: the name of the folder.
        make: whether a missing folder is created.

    Returns:
        An O_PATH descriptor of the folder.

    Raises:
        OSError: the folder cannot be opened or created; ENOTDIR if `name` is a symlink or a file.
    """
    try:
        return os.open(name, FOLDER_PATH_FLAGS, dir_fd=fd)
    except FileNotFoundError:
        if not make:
            raise
    try:
        os.mkdir(name, 0o755, dir_fd=fd)
    except FileExistsError:
        pass  # Another process has created it at the same time; the open below fails if it is not a folder.
    return os.open(name, FOLDER_PATH_FLAGS, dir_fd=fd)
