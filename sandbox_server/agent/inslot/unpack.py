"""The operation `route_archive_put`: unpack a gzipped tar archive from a stream into a folder, never outside the roots.

Every folder is entered by descriptor, one path component at a time. A symlink in a path is followed only if it leads to a folder inside the roots. A symlink in
the archive may have any target, because the slot could create it as well (virtual environments contain such symlinks), but nothing is written through it.
Absolute paths, `..`, hard links that lead out of the folder, devices and FIFOs are refused before anything of that member is written. Members before a
refused one stay. The files belong to the user of the slot, set-id bits are dropped, and existing files are replaced.
"""

from __future__ import annotations

import os
import stat
import tarfile

from sandbox_server.agent.inslot.confine import ConfinedPath, Refusal, open_subfolder, quote_path, refusal_for_os_error
from sandbox_server.agent.inslot.tarstream import Member, TarStream

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Mapping

    from sandbox_server.agent.inslot.reply import Reply

_FILES = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OWNER_ALL = 0o700


def route_archive_put(args: Mapping[str, Any], ctx: Mapping[str, Any], reply: Reply, in_fd: int) -> None:
    """Unpack the archive that is read from `in_fd` into a folder. A missing folder is created."""
    confined = ConfinedPath(args["path"], ctx)
    top = confined.open_folder(confined.real)
    count = 0
    reader = _ArchiveReader(confined, top)
    try:
        stream = TarStream(in_fd)
        for member in stream:
            try:
                reader.unpack_member(member, stream)
            except OSError as error:
                raise refusal_for_os_error(error, member.path) from None
            count += 1
        reader.restrict_folders()
    finally:
        reader.close_folder()
        os.close(top)
    reply.send_ok(entries=count)


class _ArchiveReader:
    def __init__(self, confined: ConfinedPath, top: int) -> None:
        self._confined = confined
        self._top = top
        self._folder: tuple[str, ...] = ()  # The folder that was entered last; the next member is probably in it, too.
        self._fd = os.dup(top)
        self._modes: list[tuple[tuple[str, ...], int]] = []

    def close_folder(self) -> None:
        os.close(self._fd)

    def unpack_member(self, member: Member, stream: TarStream) -> None:
        """Create the file, folder or link of one member.

        Raises:
            Refusal: the path of the member is not allowed, or members of this type are not supported.
            OSError: the file system refuses an operation.
        """
        parts = _path_components(member.path, member.path)
        if member.kind == tarfile.DIRTYPE:
            self._make_folder(parts, member.mode)
            return
        if member.kind not in (*_FILES, tarfile.SYMTYPE, tarfile.LNKTYPE):
            raise Refusal("invalid", f"{quote_path(member.path)} is {_describe_type(member.kind)}, which is not supported")
        if not parts:
            raise Refusal("invalid", f"{quote_path(member.path)} has no name")
        if member.kind == tarfile.SYMTYPE and (not member.target or "\0" in member.target):
            raise Refusal("invalid", f"{quote_path(member.path)} is a symlink without a target")
        if member.kind == tarfile.LNKTYPE:
            self._create_hard_link(parts, member)
            return
        folder_fd, name = self._enter(parts[:-1], member.path), parts[-1]
        if member.kind == tarfile.SYMTYPE:
            self._remove_existing(folder_fd, name)
            os.symlink(member.target, name, dir_fd=folder_fd)
            return
        self._create_file(folder_fd, name, member, stream)

    def restrict_folders(self) -> None:
        """Set the final modes of the folders, the deepest folder first. Without write permission they could not have been filled."""
        for parts, mode in sorted(self._modes, key=lambda folder: -len(folder[0])):
            os.chmod(".", mode, dir_fd=self._enter(parts, "/".join(parts)))

    def _make_folder(self, parts: tuple[str, ...], mode: int) -> None:
        if not parts:
            return  # The folder that the archive is unpacked into keeps its mode.
        fd = self._enter(parts, "/".join(parts))
        os.chmod(".", mode | _OWNER_ALL, dir_fd=fd)
        if mode & _OWNER_ALL != _OWNER_ALL:
            self._modes.append((parts, mode))

    def _create_file(self, folder_fd: int, name: str, member: Member, stream: TarStream) -> None:
        self._remove_existing(folder_fd, name)
        fd = os.open(name, _CREATE_FLAGS, 0o600, dir_fd=folder_fd)
        try:
            for data in iter(stream.read, b""):
                view = memoryview(data)
                while view:
                    view = view[os.write(fd, view) :]
            os.fchmod(fd, member.mode)
            os.utime(fd, (member.mtime, member.mtime))
        except BaseException:  # whatever happens, also a lack of memory: the slot must not find half of a file
            os.unlink(name, dir_fd=folder_fd)
            raise
        finally:
            os.close(fd)

    def _create_hard_link(self, parts: tuple[str, ...], member: Member) -> None:
        source = _path_components(member.target, member.path)
        try:
            source_fd = os.dup(self._enter(source[:-1], member.path, make=False))
        except FileNotFoundError:
            raise _refusal_missing_source(member) from None
        try:
            if not source or not _is_regular(source_fd, source[-1]):
                raise _refusal_missing_source(member)
            if source == parts:
                return
            folder_fd = self._enter(parts[:-1], member.path)
            self._remove_existing(folder_fd, parts[-1])
            os.link(source[-1], parts[-1], src_dir_fd=source_fd, dst_dir_fd=folder_fd, follow_symlinks=False)
        finally:
            os.close(source_fd)

    @staticmethod
    def _remove_existing(folder_fd: int, name: str) -> None:
        try:
            os.unlink(name, dir_fd=folder_fd)
        except FileNotFoundError:
            pass

    def _enter(self, parts: tuple[str, ...], path: str, make: bool = True) -> int:
        """Enter a folder below the top.

        Args:
            parts: the components of its path.
            path: the path of the member, for error sentences.
            make: whether missing folders are created.

        Returns:
            A descriptor of the folder that stays open until the next call. This object closes it.
        """
        known = len(self._folder)
        if parts[:known] != self._folder:
            known = 0
            self._replace_descriptor(os.dup(self._top), ())
        for at in range(known, len(parts)):
            self._replace_descriptor(self._enter_subfolder(parts[at], path, make), parts[: at + 1])
        return self._fd

    def _replace_descriptor(self, fd: int, folder: tuple[str, ...]) -> None:
        os.close(self._fd)
        self._fd, self._folder = fd, folder

    def _enter_subfolder(self, name: str, path: str, make: bool) -> int:
        try:
            return open_subfolder(self._fd, name, make)
        except NotADirectoryError:
            if not stat.S_ISLNK(os.stat(name, dir_fd=self._fd, follow_symlinks=False).st_mode):
                raise
        here = os.readlink(f"/proc/self/fd/{int(self._fd)}")
        try:
            real = self._confined.resolve(f"{here}/{name}")
        except Refusal:
            raise Refusal("path_outside", f"{quote_path(path)} goes through a symlink that leads out of {self._confined.real}") from None
        return self._confined.open_folder(real)


def _path_components(path: str, member: str) -> tuple[str, ...]:
    parts = tuple(part for part in path.split("/") if part not in ("", "."))
    shown = quote_path(path) if path == member else f"{quote_path(member)}, a link to {quote_path(path)},"
    if path.startswith("/") or ".." in parts:
        raise Refusal("path_outside", f"{shown} leads out: paths in an archive must be relative and must not contain `..`")
    if "\0" in path:
        raise Refusal("invalid", f"{shown} contains a NUL character")
    return parts


def _is_regular(folder_fd: int, name: str) -> bool:
    try:
        return stat.S_ISREG(os.stat(name, dir_fd=folder_fd, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def _refusal_missing_source(member: Member) -> Refusal:
    return Refusal("invalid", f"{quote_path(member.path)} is a hard link to {quote_path(member.target)}, and the archive contains no such file before it")


def _describe_type(kind: bytes) -> str:
    named = {tarfile.CHRTYPE: "a device", tarfile.BLKTYPE: "a device", tarfile.FIFOTYPE: "a FIFO"}
    return named.get(kind, f"of the unknown type {kind!a}")
