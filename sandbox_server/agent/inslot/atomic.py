"""Atomic file writes: after a write the file has either all of the new content or none of it."""

from __future__ import annotations

import errno
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType

_UNSUPPORTED = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT, errno.ENOSYS)


class Replacement:
    """New content for the file `name` in the folder `folder_fd`.

    The caller writes the content and then calls `commit`. Without a commit nothing is left behind. Where the file system supports O_TMPFILE, the content
    has no name before the commit, so even a writer that is killed leaves nothing behind.

    Args:
        folder_fd: descriptor of the folder; the caller closes it.
        name: the name of the file in the folder.
        mode: the permission bits of the new file.
    """

    def __init__(self, folder_fd: int, name: str, mode: int) -> None:
        self._folder = folder_fd
        self._name = name
        self._mode = mode
        self._temporary: str | None = None
        try:
            self._fd = os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=folder_fd)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            self._fd = self._open_temporary_file()

    def __enter__(self) -> Replacement:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.close(self._fd)
        if self._temporary is not None:
            try:
                os.unlink(self._temporary, dir_fd=self._folder)
            except FileNotFoundError:
                pass  # The slot has removed the temporary file itself; an exception that is already raised must not be replaced.

    @property
    def fd(self) -> int:
        """The descriptor of the new content."""
        return self._fd

    def write(self, data: bytes | memoryview) -> None:
        """Append all bytes of `data` to the new content."""
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]

    def commit(self) -> None:
        """Replace the file by the new content in one step."""
        os.fchmod(self._fd, self._mode)
        if self._temporary is None:
            self._link_temporary_name()
        assert self._temporary is not None
        os.rename(self._temporary, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        self._temporary = None

    def _link_temporary_name(self) -> None:
        name = _make_temporary_name()
        try:
            os.link(f"/proc/self/fd/{int(self._fd)}", name, dst_dir_fd=self._folder, follow_symlinks=True)
            self._temporary = name
        except OSError:
            self._copy_to_temporary_file()  # /proc is missing, or the kernel cannot link a file without a name.

    def _copy_to_temporary_file(self) -> None:
        nameless, at = self._fd, 0
        info = os.fstat(nameless)
        try:
            self._fd = self._open_temporary_file()
            os.fchmod(self._fd, self._mode)
            while True:
                data = os.pread(nameless, 1 << 16, at)
                if not data:
                    break
                self.write(data)
                at += len(data)
            os.utime(self._fd, ns=(info.st_atime_ns, info.st_mtime_ns))
        finally:
            os.close(nameless)

    def _open_temporary_file(self) -> int:
        name = _make_temporary_name()
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self._folder)
        self._temporary = name
        return fd


def _make_temporary_name() -> str:
    return f".put-{os.urandom(8).hex()}"
