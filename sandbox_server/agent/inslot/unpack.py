"""route_archive_put: a streamed gzipped tar into a folder, never out of the roots.

Every folder that is written into is entered by descriptor, name by name; a symlink on the way is followed only where it leads inside.
A symlink itself may point anywhere, as the slot could make it too (a virtual environment has some): nothing is ever written through it.
Members are refused by name before anything of them is written: absolute paths, `..`, hard links that lead out, devices, FIFOs.
Members before a refused one stay. Owners are the slot's, set-id bits are dropped, files that are there are replaced.
"""

from __future__ import annotations

import os
import stat
import tarfile

from sandbox_server.agent.inslot.confine import Confined, Refusal, refusal_of, show, step
from sandbox_server.agent.inslot.tarstream import Member, TarStream

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Mapping

    from sandbox_server.agent.inslot.reply import Reply

_FILES = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OWNER_ALL = 0o700


def route_archive_put(args: Mapping[str, Any], ctx: Mapping[str, Any], reply: Reply, in_fd: int) -> None:
    """Unpack into the folder, which is made if it is not there."""
    place = Confined(args["path"], ctx)
    top = place.open_folder(place.real)
    count = 0
    unpack = _Unpack(place, top)
    try:
        stream = TarStream(in_fd)
        for member in stream:
            try:
                unpack.member(member, stream)
            except OSError as error:
                raise refusal_of(error, member.path) from None
            count += 1
        unpack.restrict_folders()
    finally:
        unpack.close()
        os.close(top)
    reply.ok(entries=count)


class _Unpack:
    def __init__(self, place: Confined, top: int) -> None:
        self._place = place
        self._top = top
        self._folder: tuple[str, ...] = ()  # the one entered last, which the next member is most likely in
        self._fd = os.dup(top)
        self._modes: list[tuple[tuple[str, ...], int]] = []

    def close(self) -> None:
        os.close(self._fd)

    def member(self, member: Member, stream: TarStream) -> None:
        """Put one member in its place.

        Raises:
            Refusal: it may not be there, or is of a kind that is not taken.
            OSError: the file system does not take it.
        """
        parts = _names(member.path, member.path)
        if member.kind == tarfile.DIRTYPE:
            self._make_folder(parts, member.mode)
            return
        if member.kind not in (*_FILES, tarfile.SYMTYPE, tarfile.LNKTYPE):
            raise Refusal("invalid", f"{show(member.path)} is {_kind(member.kind)}, which is not taken")
        if not parts:
            raise Refusal("invalid", f"{show(member.path)} has no name")
        if member.kind == tarfile.SYMTYPE and (not member.target or "\0" in member.target):
            raise Refusal("invalid", f"{show(member.path)} is a symlink to nothing")
        if member.kind == tarfile.LNKTYPE:
            self._link(parts, member)
            return
        folder_fd, name = self._enter(parts[:-1], member.path), parts[-1]
        if member.kind == tarfile.SYMTYPE:
            self._make_way(folder_fd, name)
            os.symlink(member.target, name, dir_fd=folder_fd)
            return
        self._file(folder_fd, name, member, stream)

    def restrict_folders(self) -> None:
        """Give folders their modes, the deepest first: one without write permission could not have been filled."""
        for parts, mode in sorted(self._modes, key=lambda folder: -len(folder[0])):
            os.chmod(".", mode, dir_fd=self._enter(parts, "/".join(parts)))

    def _make_folder(self, parts: tuple[str, ...], mode: int) -> None:
        if not parts:
            return  # the folder it all goes into keeps its own mode
        fd = self._enter(parts, "/".join(parts))
        os.chmod(".", mode | _OWNER_ALL, dir_fd=fd)
        if mode & _OWNER_ALL != _OWNER_ALL:
            self._modes.append((parts, mode))

    def _file(self, folder_fd: int, name: str, member: Member, stream: TarStream) -> None:
        self._make_way(folder_fd, name)
        fd = os.open(name, _CREATE_FLAGS, 0o600, dir_fd=folder_fd)
        try:
            for data in iter(stream.read, b""):
                view = memoryview(data)
                while view:
                    view = view[os.write(fd, view) :]
            os.fchmod(fd, member.mode)
            os.utime(fd, (member.mtime, member.mtime))
        except BaseException:
            os.unlink(name, dir_fd=folder_fd)
            raise
        finally:
            os.close(fd)

    def _link(self, parts: tuple[str, ...], member: Member) -> None:
        source = _names(member.target, member.path)
        try:
            source_fd = os.dup(self._enter(source[:-1], member.path, make=False))
        except FileNotFoundError:
            raise _no_source(member) from None
        try:
            if not source or not _is_regular(source_fd, source[-1]):
                raise _no_source(member)
            if source == parts:
                return
            folder_fd = self._enter(parts[:-1], member.path)
            self._make_way(folder_fd, parts[-1])
            os.link(source[-1], parts[-1], src_dir_fd=source_fd, dst_dir_fd=folder_fd, follow_symlinks=False)
        finally:
            os.close(source_fd)

    @staticmethod
    def _make_way(folder_fd: int, name: str) -> None:
        try:
            os.unlink(name, dir_fd=folder_fd)
        except FileNotFoundError:
            pass

    def _enter(self, parts: tuple[str, ...], path: str, make: bool = True) -> int:
        """The folder, by default made where it is not there; belongs to this object until the next call."""
        known = len(self._folder)
        if parts[:known] != self._folder:
            known = 0
            self._swap(os.dup(self._top), ())
        for at in range(known, len(parts)):
            self._swap(self._step(parts[at], path, make), parts[: at + 1])
        return self._fd

    def _swap(self, fd: int, folder: tuple[str, ...]) -> None:
        os.close(self._fd)
        self._fd, self._folder = fd, folder

    def _step(self, name: str, path: str, make: bool) -> int:
        try:
            return step(self._fd, name, make)
        except NotADirectoryError:
            if not stat.S_ISLNK(os.stat(name, dir_fd=self._fd, follow_symlinks=False).st_mode):
                raise
        here = os.readlink(f"/proc/self/fd/{int(self._fd)}")
        try:
            real = self._place.resolve(f"{here}/{name}")
        except Refusal:
            raise Refusal("path_outside", f"{show(path)} goes through a symlink that leads out of {self._place.real}") from None
        return self._place.open_folder(real)


def _names(path: str, member: str) -> tuple[str, ...]:
    parts = tuple(part for part in path.split("/") if part not in ("", "."))
    shown = show(path) if path == member else f"{show(member)}, a link to {show(path)},"
    if path.startswith("/") or ".." in parts:
        raise Refusal("path_outside", f"{shown} leads out: paths in an archive are relative and without `..`")
    if "\0" in path:
        raise Refusal("invalid", f"{shown} holds a NUL")
    return parts


def _is_regular(folder_fd: int, name: str) -> bool:
    try:
        return stat.S_ISREG(os.stat(name, dir_fd=folder_fd, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def _no_source(member: Member) -> Refusal:
    return Refusal("invalid", f"{show(member.path)} is a hard link to {show(member.target)}, and no such file came before it")


def _kind(kind: bytes) -> str:
    named = {tarfile.CHRTYPE: "a device", tarfile.BLKTYPE: "a device", tarfile.FIFOTYPE: "a FIFO"}
    return named.get(kind, f"of the unknown kind {kind!a}")
