"""Paths a slot chose: where they lead, whether a file route may go there, and how to open them without being held up.

All of this runs with the slot's own rights inside the slot's own view, so a race can only hurt the slot itself;
a route is verified again after the open all the same, so that it never delivers what lies outside its roots.
"""

from __future__ import annotations

import errno
import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Mapping, Sequence

MAX_LINKS = 40  # as the kernel
READ_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
FOLDER_FLAGS = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
CHUNK_BYTES = 64 << 10


class Refusal(Exception):
    """An operation could not be done, and the caller is told why.

    Args:
        code: `invalid_args`, `file_not_found`, `file_error`, `path_outside` or `invalid`.
        detail: one sentence that names the path and what to do.
        errno_name: such as EISDIR, where there is one.
    """

    def __init__(self, code: str, detail: str, errno_name: str | None = None) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail
        self.errno_name = errno_name


def show(path: str) -> str:
    """The path for a line of text: as it is where it can be printed, else quoted the way bash reads it back ($'a\\nb')."""
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


def refusal_of(error: OSError, path: str) -> Refusal:
    """What an OSError means for the caller of a file operation."""
    number = error.errno or errno.EIO
    shown = show(path)
    sentence = {
        errno.ENOENT: "no such file or folder: %s",
        errno.EACCES: "permission denied: %s",
        errno.EPERM: "not permitted: %s",
        errno.EISDIR: "%s is a folder, not a file",
        errno.ENOTDIR: "%s, or a part of it, is not a folder",
        errno.ENOSPC: "no space left for %s: remove something or write less",
        errno.EDQUOT: "no space left for %s: remove something or write less",
        errno.EFBIG: "%s would be larger than a file may be here",
        errno.EROFS: "%s is on a read-only file system: write under the workspace or /tmp",
        errno.ELOOP: "%s leads through too many symlinks, or in a circle",
        errno.ENAMETOOLONG: "the path is too long: %.200s",
    }.get(number, f"{os.strerror(number).replace('%', '%%')}: %s")
    code = "file_not_found" if number == errno.ENOENT else "file_error"
    return Refusal(code, sentence % shown, errno.errorcode.get(number, "EIO"))


def not_regular(path: str, mode: int) -> Refusal:
    """The refusal for what is there but is no regular file."""
    if stat.S_ISDIR(mode):
        return refusal_of(OSError(errno.EISDIR, ""), path)
    kind = "a FIFO" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device" if not stat.S_ISLNK(mode) else "a symlink"
    return Refusal("file_error", f"{show(path)} is {kind}, not a regular file", "EINVAL")


def tool_path(path: str | None, ctx: Mapping[str, Any]) -> str:
    """The absolute path a tool's argument means: relative ones start in the workspace, `~` is the home."""
    if path is None:
        return str(ctx["workspace"])
    if path == "~" or path.startswith("~/"):
        return str(ctx.get("home") or ctx["workspace"]) + path[1:]
    return path if path.startswith("/") else f"{ctx['workspace']}/{path}"


def follow(path: str) -> str:
    """Where an absolute path leads, without symlinks. What is not there yet is taken as it is written.

    Raises:
        OSError: the path goes through a file, a loop, a folder that may not be searched, or `..` of something missing; `filename` is how far it came.
    """
    resolved, missing, links = "", False, 0
    pending = _parts(path)
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
            pending += _parts(target)
            continue
        if not stat.S_ISDIR(mode) and (pending or path.endswith("/")):
            raise OSError(errno.ENOTDIR, "", here)
        resolved = here
    return resolved or "/"


def _parts(path: str) -> list[str]:
    return [part for part in reversed(path.split("/")) if part not in ("", ".")]


def inside(path: str, roots: Sequence[str]) -> bool:
    """Whether a resolved path is one of the resolved roots or lies below one."""
    return any(path == root or path.startswith(f"{root.rstrip('/')}/") for root in roots)


def _outside(path: str, roots: Sequence[str]) -> Refusal:
    return Refusal("path_outside", f"{show(path)} leads out of {' and '.join(roots)}: file routes stay inside")


class Confined:
    """A path of a file route, resolved and found to be inside the roots."""

    def __init__(self, path: str, ctx: Mapping[str, Any]) -> None:
        self.asked = path
        self.roots = [follow(root) for root in ctx["roots"]]
        self.real = self.resolve(path if path.startswith("/") else f"{ctx['workspace']}/{path}")

    def resolve(self, path: str) -> str:
        """Where the absolute path leads.

        Raises:
            Refusal: out of the roots.
            OSError: it cannot be followed inside them.
        """
        try:
            real = follow(path)
        except OSError as error:
            # What is wrong with a place outside is none of the caller's business.
            if not inside(str(error.filename), self.roots):
                raise _outside(self.asked, self.roots) from None
            raise
        if not inside(real, self.roots):
            raise _outside(self.asked, self.roots)
        return real

    def open(self, flags: int = READ_FLAGS) -> int:
        """Open it, and make sure that what was opened is still inside.

        Raises:
            Refusal: it was led out meanwhile.
            OSError: it cannot be opened.
        """
        fd = os.open(self.real, flags | os.O_NOFOLLOW)
        try:
            self.verify(fd)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def verify(self, fd: int) -> None:
        """Raise the refusal if the open file lies outside the roots; without /proc the resolution before has to do."""
        try:
            where = os.readlink(f"/proc/self/fd/{int(fd)}")
        except OSError:
            return
        if not inside(where, self.roots):
            raise _outside(self.asked, self.roots)

    def open_regular(self) -> tuple[int, os.stat_result]:
        """Open a regular file for reading; anything else is refused without having been opened."""
        return open_regular(self.real, self.asked, self.open)

    def open_parent(self) -> tuple[int, str]:
        """The folder to write into, made if it is not there, and the name in it. Raises as `descend`, EISDIR for a root itself."""
        if self.asked.endswith("/") or self.real in self.roots:
            raise OSError(errno.EISDIR, "")
        folder, _, name = self.real.rpartition("/")
        return self.open_folder(folder), name

    def open_folder(self, folder: str) -> int:
        """A resolved folder inside the roots, made with what leads to it if it is not there."""
        root = next(root for root in self.roots if inside(folder, [root]))
        return descend(root, folder[len(root) :])


def open_regular(real: str, asked: str, opener: Any = None) -> tuple[int, os.stat_result]:
    """Open a regular file for reading. Anything else is refused, by its kind, before it is opened: opening a FIFO or a device can do things."""
    mode = os.stat(real).st_mode
    if not stat.S_ISREG(mode):
        raise not_regular(asked, mode)
    fd = opener() if opener is not None else os.open(real, READ_FLAGS)
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        os.close(fd)
        raise not_regular(asked, info.st_mode)
    return fd, info


def descend(top: str, below: str) -> int:
    """An O_PATH descriptor of the folder `below` the resolved folder `top`, making what is missing, following no symlink."""
    fd = os.open(top, FOLDER_FLAGS)
    for name in reversed(_parts(below)):
        try:
            deeper = step(fd, name)
        finally:
            os.close(fd)
        fd = deeper
    return fd


def step(fd: int, name: str, make: bool = True) -> int:
    """The folder `name` in the folder `fd`, by default made if it is not there. A symlink is ENOTDIR."""
    try:
        return os.open(name, FOLDER_FLAGS, dir_fd=fd)
    except FileNotFoundError:
        if not make:
            raise
    try:
        os.mkdir(name, 0o755, dir_fd=fd)
    except FileExistsError:
        pass  # somebody was faster; what it is, the open says
    return os.open(name, FOLDER_FLAGS, dir_fd=fd)
