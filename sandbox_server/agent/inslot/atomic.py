"""A file that is either all there or not at all."""

from __future__ import annotations

import errno
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType

_UNSUPPORTED = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT, errno.ENOSYS)


class Replacement:
    """New content for `name` in the folder `folder_fd`: write, then `commit`; without a commit nothing is left behind.

    The content has no name until then where the file system can do that (O_TMPFILE), so even a writer that is killed leaves nothing.

    Args:
        folder_fd: the folder; the caller closes it.
        name: the file's name in it.
        mode: the permission bits it gets.
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
            self._fd = self._open_named()

    def __enter__(self) -> Replacement:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.close(self._fd)
        if self._temporary is not None:
            try:
                os.unlink(self._temporary, dir_fd=self._folder)
            except FileNotFoundError:
                pass  # the slot took it away itself; what went wrong before is what counts

    @property
    def fd(self) -> int:
        """The descriptor behind it."""
        return self._fd

    def write(self, data: bytes) -> None:
        """Append all of it."""
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]

    def commit(self) -> None:
        """Put it in the place of what is there, in one step."""
        os.fchmod(self._fd, self._mode)
        if self._temporary is None:
            self._give_name()
        assert self._temporary is not None
        os.rename(self._temporary, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        self._temporary = None

    def _give_name(self) -> None:
        name = _fresh_name()
        try:
            os.link(f"/proc/self/fd/{int(self._fd)}", name, dst_dir_fd=self._folder, follow_symlinks=True)
            self._temporary = name
        except OSError:
            self._copy_to_named()  # no /proc, or a kernel that does not link what has no name

    def _copy_to_named(self) -> None:
        nameless, at = self._fd, 0
        info = os.fstat(nameless)
        try:
            self._fd = self._open_named()
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

    def _open_named(self) -> int:
        name = _fresh_name()
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self._folder)
        self._temporary = name
        return fd


def _fresh_name() -> str:
    return f".put-{os.urandom(8).hex()}"
