"""Finds and removes the files and folders of some users in folders that all users may write to, at any depth.

Symlinks are never followed, other file systems are not entered, and a tree of any depth needs two open descriptors. What belongs to a user is decided by the
owner alone: a user may have put files into a folder of another user, or another user may have put files into a folder of this one. A folder that one of the
users owns is moved as a whole, by one rename, into a folder of root (a *trash folder*), which the caller deletes later. Errors in folders of other users are
only reported, because these users can cause them.
"""

from __future__ import annotations

import itertools
import os
import secrets
import stat
import time
from typing import Collection, Container

from sandbox_server.agent.kernel.trash import FOLDER_FLAGS

_MAX_ENTRIES = 1_000_000
_WITHIN_S = 5.0
_MAX_REPORTS = 20
_ENTERED_BY_OTHERS, _WRITTEN_BY_OTHERS = 0o011, 0o022
TRASH_PREFIX = ".sandbox-pool-"


class Sweep:
    """One search for the files and folders of some users.

    Args:
        owner_uids: the uids of the users.
        slot_uids: all uids that slots may have. Their folders are searched whatever their mode is, because the mode may have been changed.
        trash_prefix: the prefix of the names of trash folders.
        excluded: folders, as device and inode, that are not searched.
        list_only: whether the files are only listed and not removed.

    Attributes:
        removed: the number of removed files and folders.
        found: the names that were found, with `list_only`.
        errors: what belongs to the users and could not be removed.
        unsearched: folders of other users that could not be searched.
        trash_folders: the trash folders, which the caller must delete.
    """

    def __init__(
        self,
        owner_uids: Container[int],
        slot_uids: Container[int],
        trash_prefix: str = TRASH_PREFIX,
        excluded: Collection[tuple[int, int]] = (),
        list_only: bool = False,
    ) -> None:
        self._owner_uids = owner_uids
        self._slot_uids = slot_uids
        self._trash_prefix = trash_prefix
        self._excluded = excluded
        self._list_only = list_only
        self._deadline = time.monotonic() + _WITHIN_S
        self._entry_count = 0
        self._numbers = itertools.count()
        self._folder = ""
        self._top = self._trash_fd = -1
        self._device = 0
        self.removed = 0
        self.found: list[str] = []
        self.errors: list[str] = []
        self.unsearched: list[str] = []
        self.trash_folders: list[str] = []

    def search_folder(self, path: str) -> None:
        """Search one folder. All its entries are checked. The trees of other users in it are searched only up to a limit of entries and time."""
        try:
            self._top = os.open(path, FOLDER_FLAGS)
        except OSError:
            return  # The folder does not exist on this machine.
        self._folder, self._device = path, os.fstat(self._top).st_dev
        try:
            for name in self._search_entries(self._top):
                self._search_tree(name)
        finally:
            os.close(self._top)
            if self._trash_fd >= 0:
                os.close(self._trash_fd)
            self._top = self._trash_fd = -1

    def _search_tree(self, name: str) -> None:
        current = self._open_subfolder(name, self._top)
        if current < 0:
            return
        try:
            path = [(os.fstat(current).st_ino, self._search_entries(current))]
            while path and not self._is_over_limit(name):
                names = path[-1][1]
                if names:
                    below = self._open_subfolder(names.pop(), current)
                    if below >= 0:
                        os.close(current)
                        current = below
                        path.append((os.fstat(current).st_ino, self._search_entries(current)))
                    continue
                path.pop()
                if path:
                    above = os.open("..", FOLDER_FLAGS, dir_fd=current)
                    os.close(current)
                    current = above
                    if os.fstat(current).st_ino != path[-1][0]:
                        self._report_unsearched(name, "it was moved during the search")
                        return
        except OSError as error:
            self._report_unsearched(name, error.strerror or str(error))
        finally:
            os.close(current)

    def _is_over_limit(self, name: str) -> bool:
        if self._entry_count <= _MAX_ENTRIES and time.monotonic() < self._deadline:
            return False
        self._report_unsearched(name, "it holds too much")
        return True

    def _report_unsearched(self, name: str, why: str) -> None:
        if len(self.unsearched) < _MAX_REPORTS:
            self.unsearched.append("%s/%s: %s" % (self._folder, ascii(name)[1:-1], why))

    def _open_subfolder(self, name: str, folder: int) -> int:
        """Open a folder inside a folder. Returns -1 if it no longer exists or must not be entered."""
        try:
            fd = os.open(name, FOLDER_FLAGS, dir_fd=folder)
        except OSError as error:
            if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
                self._report_unsearched(name, error.strerror or str(error))
            return -1
        if os.fstat(fd).st_dev == self._device:
            return fd
        os.close(fd)
        return -1

    def _search_entries(self, folder: int) -> list[str]:
        """Remove what the users own in an open folder. Returns the names of the folders in it that must be searched."""
        info = os.fstat(folder)
        checks_files = info.st_uid in self._slot_uids or bool(info.st_mode & _WRITTEN_BY_OTHERS)
        names = []
        with os.scandir(folder) as entries:
            for entry in entries:
                if folder != self._top:
                    self._entry_count += 1
                    if self._entry_count > _MAX_ENTRIES or time.monotonic() > self._deadline:
                        break
                if (checks_files or entry.is_dir(follow_symlinks=False)) and self._check_entry(entry.name, folder):
                    names.append(entry.name)
        return names

    def _check_entry(self, name: str, folder: int) -> bool:
        """Remove an entry if one of the users owns it. Otherwise return whether it is a folder that must be searched."""
        try:
            info = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except OSError:
            return False  # It no longer exists.
        if (info.st_dev, info.st_ino) in self._excluded:
            return False
        is_folder = stat.S_ISDIR(info.st_mode)
        if info.st_uid in self._owner_uids:
            self._remove_entry(name, folder, is_folder)
            return False
        return is_folder and (info.st_uid in self._slot_uids or bool(info.st_mode & _ENTERED_BY_OTHERS))

    def _remove_entry(self, name: str, folder: int, is_folder: bool) -> None:
        if self._list_only:
            self.found.append(name)
            return
        try:
            if is_folder:
                self._move_to_trash_folder(name, folder)
            else:
                os.unlink(name, dir_fd=folder)
            self.removed += 1
        except FileNotFoundError:
            return
        except OSError as error:
            if folder == self._top:
                self.errors.append("%s/%s: %s" % (self._folder, ascii(name)[1:-1], error.strerror))
            else:
                self._report_unsearched(name, error.strerror or str(error))

    def _move_to_trash_folder(self, name: str, folder: int) -> None:
        if self._trash_fd < 0:
            path = os.path.join(self._folder, self._trash_prefix + secrets.token_hex(8))
            os.mkdir(path, 0o700)
            self.trash_folders.append(path)
            self._trash_fd = os.open(path, FOLDER_FLAGS)
        target = str(next(self._numbers))
        os.rename(name, target, src_dir_fd=folder, dst_dir_fd=self._trash_fd)
        if os.stat(target, dir_fd=self._trash_fd, follow_symlinks=False).st_uid not in self._owner_uids:
            os.rename(target, name, src_dir_fd=self._trash_fd, dst_dir_fd=folder)  # The owner of the folder has replaced it by something else meanwhile.
