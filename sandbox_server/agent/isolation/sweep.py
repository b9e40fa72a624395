"""Finding what some users own in folders that everybody may write, however deep it lies, and taking it away.

Links are never followed, no other file system is entered, and a tree of any depth takes two open files. What is found is one's own only by its owner: a
neighbour may have put it into its own folder, or may have put its own things into one's. So a folder that is owned goes as a whole, by one rename into a
folder of root's, to be deleted behind; and what becomes of a walk through the folders of others is reported, but is nobody's fault but theirs.
"""

from __future__ import annotations

import itertools
import os
import secrets
import stat
import time
from typing import Collection, Container

_DIR_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_ENTRIES = 1_000_000
_WITHIN_S = 5.0
_MAX_REPORTS = 20
_ENTERED_BY_OTHERS, _WRITTEN_BY_OTHERS = 0o011, 0o022
BIN_PREFIX = ".sandbox-pool-"


class Sweep:
    """One search for what some users own.

    Args:
        owners: whose things are taken.
        slots: every uid that may be a slot's: their folders are looked into whatever the mode, for they may have been open before.
        bins: what the names of the folders for what is taken begin with.
        spared: folders, as device and inode, that are left alone with all that is in them.
        look_only: nothing is taken, only listed.
    """

    def __init__(
        self, owners: Container[int], slots: Container[int], bins: str = BIN_PREFIX, spared: Collection[tuple[int, int]] = (), look_only: bool = False
    ) -> None:
        self._owners = owners
        self._slots = slots
        self._prefix = bins
        self._spared = spared
        self._look_only = look_only
        self._deadline = time.monotonic() + _WITHIN_S
        self._seen = 0
        self._numbers = itertools.count()
        self._place = ""
        self._top = self._bin = -1
        self._device = 0
        self.removed = 0
        self.found: list[str] = []  # names, with `look_only`
        self.errors: list[str] = []  # what is theirs and is still there
        self.unswept: list[str] = []  # what of others' could not be looked through
        self.bins: list[str] = []  # to be deleted

    def through(self, place: str) -> None:
        """Search one folder. What lies in it is looked at to the last name; the trees of others in it only as long as that is bearable."""
        try:
            self._top = os.open(place, _DIR_FLAGS)
        except OSError:
            return  # there is no such place here
        self._place, self._device = place, os.fstat(self._top).st_dev
        try:
            for name in self._scan(self._top):
                self._tree(name)
        finally:
            os.close(self._top)
            if self._bin >= 0:
                os.close(self._bin)
            self._top = self._bin = -1

    def _tree(self, name: str) -> None:
        current = self._enter(name, self._top)
        if current < 0:
            return
        try:
            path = [(os.fstat(current).st_ino, self._scan(current))]
            while path and not self._tired(name):
                names = path[-1][1]
                if names:
                    below = self._enter(names.pop(), current)
                    if below >= 0:
                        os.close(current)
                        current = below
                        path.append((os.fstat(current).st_ino, self._scan(current)))
                    continue
                path.pop()
                if path:
                    above = os.open("..", _DIR_FLAGS, dir_fd=current)
                    os.close(current)
                    current = above
                    if os.fstat(current).st_ino != path[-1][0]:
                        self._unswept(name, "it was moved meanwhile")
                        return
        except OSError as error:
            self._unswept(name, error.strerror or str(error))
        finally:
            os.close(current)

    def _tired(self, name: str) -> bool:
        if self._seen <= _MAX_ENTRIES and time.monotonic() < self._deadline:
            return False
        self._unswept(name, "it holds too much")
        return True

    def _unswept(self, name: str, why: str) -> None:
        if len(self.unswept) < _MAX_REPORTS:
            self.unswept.append("%s/%s: %s" % (self._place, ascii(name)[1:-1], why))

    def _enter(self, name: str, folder: int) -> int:
        """Open a folder of a folder; -1: it has gone, or is not to be entered."""
        try:
            fd = os.open(name, _DIR_FLAGS, dir_fd=folder)
        except OSError as error:
            if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
                self._unswept(name, error.strerror or str(error))
            return -1
        if os.fstat(fd).st_dev == self._device:
            return fd
        os.close(fd)
        return -1

    def _scan(self, folder: int) -> list[str]:
        """Take what is owned in an open folder; the names of the folders in it that are to be entered."""
        info = os.fstat(folder)
        thorough = info.st_uid in self._slots or bool(info.st_mode & _WRITTEN_BY_OTHERS)
        names = []
        with os.scandir(folder) as entries:
            for entry in entries:
                if folder != self._top:
                    self._seen += 1
                    if self._seen > _MAX_ENTRIES or time.monotonic() > self._deadline:
                        break
                if (thorough or entry.is_dir(follow_symlinks=False)) and self._visit(entry.name, folder):
                    names.append(entry.name)
        return names

    def _visit(self, name: str, folder: int) -> bool:
        """Take it if it is owned; else whether it is a folder to be entered."""
        try:
            info = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except OSError:
            return False  # it has gone
        if (info.st_dev, info.st_ino) in self._spared:
            return False
        is_folder = stat.S_ISDIR(info.st_mode)
        if info.st_uid in self._owners:
            self._take(name, folder, is_folder)
            return False
        return is_folder and (info.st_uid in self._slots or bool(info.st_mode & _ENTERED_BY_OTHERS))

    def _take(self, name: str, folder: int, is_folder: bool) -> None:
        if self._look_only:
            self.found.append(name)
            return
        try:
            if is_folder:
                self._move(name, folder)
            else:
                os.unlink(name, dir_fd=folder)
            self.removed += 1
        except FileNotFoundError:
            return
        except OSError as error:
            if folder == self._top:
                self.errors.append("%s/%s: %s" % (self._place, ascii(name)[1:-1], error.strerror))
            else:
                self._unswept(name, error.strerror or str(error))

    def _move(self, name: str, folder: int) -> None:
        if self._bin < 0:
            path = os.path.join(self._place, self._prefix + secrets.token_hex(8))
            os.mkdir(path, 0o700)
            self.bins.append(path)
            self._bin = os.open(path, _DIR_FLAGS)
        target = str(next(self._numbers))
        os.rename(name, target, src_dir_fd=folder, dst_dir_fd=self._bin)
        if os.stat(target, dir_fd=self._bin, follow_symlinks=False).st_uid not in self._owners:
            os.rename(target, name, src_dir_fd=self._bin, dst_dir_fd=folder)  # whoever owns the folder has exchanged it
