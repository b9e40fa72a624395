"""Examines the entries of a workspace that become read-only, and breaks hard links into them.

All of it runs after the processes of the slot have ended, so that nothing of the slot can change an entry between its examination and its mount. The slot made
the entries, though: no symbolic link is followed, nothing but regular files is opened, and the work is limited.

A read-only mount protects the paths below it, not the files: a file with a second name outside of the entry could be written through that name. So each regular
file with more than one name is replaced by a copy of its own. Other files are not copied, however large they are.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from typing import Any, Iterator, Sequence

from sandbox_server.agent.errors import Refused
from sandbox_server.agent.execution.slot_runtime import Dirs, ReadOnlyEntry

MAX_NAMES = 64
MAX_NAME_BYTES = 255
MAX_FILES = 200_000
MAX_DEPTH = 100
MAX_COPIED_BYTES = 256 << 20
_PATH_FLAGS = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_COPY_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_CHUNK_BYTES = 16 << 20


def check_names(names: Any) -> tuple[str, ...]:
    """Return the names that a request lists, each once.

    Raises:
        Refused: they are no list of at most `MAX_NAMES` names of entries at the top of the workspace.
    """
    if not isinstance(names, (list, tuple)) or len(names) > MAX_NAMES:
        raise Refused("invalid", "read_only must be a list of at most %d names" % MAX_NAMES)
    for name in names:
        if not isinstance(name, str) or not _is_entry_name(name):
            raise Refused("invalid", "read_only: %s is no name of an entry at the top of the workspace" % ascii(name)[:300])
    return tuple(dict.fromkeys(names))


def _is_entry_name(name: str) -> bool:
    try:
        length = len(os.fsencode(name))
    except UnicodeEncodeError:
        return False
    return 0 < length <= MAX_NAME_BYTES and name not in (".", "..") and "/" not in name and "\0" not in name


def find_entries(dirs: Dirs, names: Sequence[str]) -> tuple[ReadOnlyEntry, ...]:
    """Find the entries with these names. The result holds for as long as no process of the slot runs.

    Raises:
        Refused: an entry does not exist, or is neither a regular file nor a folder. The text names it.
    """
    with _open_workspace(dirs) as workspace:
        return tuple(_find_entry(workspace, name) for name in names)


def prepare_entries(dirs: Dirs, names: Sequence[str], max_files: int = MAX_FILES) -> tuple[ReadOnlyEntry, ...]:
    """Prepare entries for their read-only mounts. No process of the slot may run.

    Args:
        dirs: the folders of the slot.
        names: the names of the entries at the top of the workspace.
        max_files: how many files and folders may be in all of them together.

    Returns:
        The entries, in which no file has a second name.

    Raises:
        Refused: an entry cannot be prepared. The text names it and says why.
    """
    with _open_workspace(dirs) as workspace:
        breaker = _LinkBreaker(max_files)
        for name in names:
            _find_entry(workspace, name)
            breaker.break_links_of(workspace, name)
        return tuple(_find_entry(workspace, name) for name in names)


@contextlib.contextmanager
def _open_workspace(dirs: Dirs) -> Iterator[int]:
    """Open the workspace. No slot owns its parent folder, but it is not followed if it should be a symbolic link all the same."""
    try:
        path_fd = os.open(dirs.workspace, _PATH_FLAGS | os.O_DIRECTORY)
    except OSError as error:
        raise Refused("file_error", "the workspace is no folder: %s" % error.strerror, _errno_name(error)) from None
    try:
        mode = stat.S_IMODE(os.fstat(path_fd).st_mode)
        if mode & stat.S_IRWXU != stat.S_IRWXU:  # Without these rights, an agent without privileges could not examine the entries.
            os.chmod("/proc/self/fd/%d" % path_fd, mode | stat.S_IRWXU)
        folder = os.open("/proc/self/fd/%d" % path_fd, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    finally:
        os.close(path_fd)
    try:
        yield folder
    finally:
        os.close(folder)


def _find_entry(workspace: int, name: str) -> ReadOnlyEntry:
    try:
        info = os.stat(name, dir_fd=workspace, follow_symlinks=False)
    except FileNotFoundError:
        raise Refused("file_not_found", "read_only: there is no entry %s at the top of the workspace" % ascii(name), "ENOENT") from None
    except OSError as error:
        raise _refusal(name, error) from None
    if stat.S_ISLNK(info.st_mode):
        raise Refused(
            "file_error", "read_only: the entry %s is a symbolic link; name its target, if that is at the top of the workspace" % ascii(name), "ELOOP"
        )
    if not stat.S_ISDIR(info.st_mode) and not stat.S_ISREG(info.st_mode):
        raise Refused("file_error", "read_only: the entry %s is neither a regular file nor a folder" % ascii(name), "EINVAL")
    return ReadOnlyEntry(name, info.st_dev, info.st_ino)


def _refusal(shown: str, error: OSError) -> Refused:
    return Refused("file_error", "read_only: %s cannot be made read-only: %s" % (ascii(shown)[:300], error.strerror), _errno_name(error))


def _errno_name(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, "EIO")


class _LinkBreaker:
    """Replaces each regular file that has more than one name by a copy. The limits apply to all entries of one request together.

    Args:
        max_files: how many files and folders are examined at most.
    """

    def __init__(self, max_files: int) -> None:
        self._max_files = max_files
        self._file_count = 0
        self._copied_bytes = 0

    def break_links_of(self, workspace: int, name: str) -> None:
        """Break the links into one entry.

        Args:
            workspace: the open folder of the entry.
            name: its name.

        Raises:
            Refused: a limit is reached, or the operating system has refused a step.
        """
        info = os.stat(name, dir_fd=workspace, follow_symlinks=False)
        if stat.S_ISDIR(info.st_mode):
            self._visit_folder(workspace, name, name, 1)
        elif info.st_nlink > 1:
            self._replace_by_copy(workspace, name, name)

    def _visit_folder(self, parent: int, name: str, shown: str, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise Refused("file_error", "read_only: %s is more than %d folders deep" % (ascii(shown)[:300], MAX_DEPTH), "ELOOP")
        try:
            folder = os.open(name, _FOLDER_FLAGS, dir_fd=parent)
        except OSError as error:
            raise _refusal(shown, error) from None
        try:
            folders, linked_files = self._list_folder(folder, shown)
            with _writable_folder(folder) if linked_files else contextlib.nullcontext():
                for child in linked_files:
                    self._replace_by_copy(folder, child, "%s/%s" % (shown, child))
            for child in folders:
                self._visit_folder(folder, child, "%s/%s" % (shown, child), depth + 1)
        finally:
            os.close(folder)

    def _list_folder(self, folder: int, shown: str) -> tuple[list[str], list[str]]:
        """Return the names of the folders in an open folder, and of the regular files that have more than one name."""
        folders, linked_files = [], []
        with os.scandir(folder) as children:
            for child in children:
                self._file_count += 1
                if self._file_count > self._max_files:
                    detail = "read_only: the entries hold more than %d files; %s was not examined" % (self._max_files, ascii(shown)[:300])
                    raise Refused("file_error", detail, "EFBIG")
                info = child.stat(follow_symlinks=False)
                if stat.S_ISDIR(info.st_mode):
                    folders.append(child.name)
                elif stat.S_ISREG(info.st_mode) and info.st_nlink > 1:
                    linked_files.append(child.name)
        return folders, linked_files

    def _replace_by_copy(self, folder: int, name: str, shown: str) -> None:
        try:
            source = os.open(name, _FILE_FLAGS, dir_fd=folder)
        except OSError as error:
            raise _refusal(shown, error) from None
        try:
            info = os.fstat(source)
            if not stat.S_ISREG(info.st_mode):  # A slot that cooperates with this one, and has a descriptor of the folder, has replaced the file just now.
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            self._copied_bytes += info.st_size
            if self._copied_bytes > MAX_COPIED_BYTES:
                detail = "read_only: %s has more than one name (hard links), and such files are only copied up to %d MiB in all; give it one name"
                raise Refused("file_error", detail % (ascii(shown)[:300], MAX_COPIED_BYTES >> 20), "EFBIG")
            _copy_over(source, info, folder, name)
        except OSError as error:
            raise _refusal(shown, error) from None
        finally:
            os.close(source)


@contextlib.contextmanager
def _writable_folder(folder: int) -> Iterator[None]:
    """Let the owner of an open folder change it for a while. Its mode and its times are as before afterwards."""
    info = os.fstat(folder)
    mode = stat.S_IMODE(info.st_mode)
    if not mode & stat.S_IWUSR:
        os.fchmod(folder, mode | stat.S_IWUSR)
    try:
        yield
    finally:
        if not mode & stat.S_IWUSR:
            os.fchmod(folder, mode)
        os.utime(folder, ns=(info.st_atime_ns, info.st_mtime_ns))


def _copy_over(source: int, info: os.stat_result, folder: int, name: str) -> None:
    """Put a copy of an open file in the place of `name`, with its owner, its mode without set-uid and set-gid, its times and its own attributes."""
    copy_name = ".read-only-%s" % secrets.token_hex(8)
    target = os.open(copy_name, _COPY_FLAGS, 0o600, dir_fd=folder)
    try:
        offset = 0
        while offset < info.st_size:
            count = os.sendfile(target, source, offset, min(_CHUNK_BYTES, info.st_size - offset))
            if count == 0:
                break
            offset += count
        for attribute in os.listxattr(source):
            if attribute.startswith("user."):
                os.setxattr(target, attribute, os.getxattr(source, attribute))
        if os.geteuid() == 0:
            os.fchown(target, info.st_uid, info.st_gid)
        os.fchmod(target, stat.S_IMODE(info.st_mode) & 0o777)
        os.utime(target, ns=(info.st_atime_ns, info.st_mtime_ns))
        os.rename(copy_name, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:  # also when this thread is interrupted: no copy may be left beside the file
        with contextlib.suppress(OSError):
            os.unlink(copy_name, dir_fd=folder)
        raise
    finally:
        os.close(target)
