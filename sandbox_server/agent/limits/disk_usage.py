"""Measures the disk usage of a slot: its folders, and the files that are deleted but still open in its processes.

Symbolic links are not followed, and no path that the slot has chosen is opened. A folder is opened by its name relative to its open parent, and it is left
through `..` only if that is the folder that it was entered from. So neither the depth of a tree nor a slot that moves folders can lead the measurement
elsewhere. The measurement pauses often and has a deadline; what it has not reached by then is not counted.
"""

from __future__ import annotations

import dataclasses
import os
import stat
import time
from typing import Callable, Dict, List, Sequence, Set, Tuple

from sandbox_server.agent.init import process_table
from sandbox_server.agent.kernel.measuring import MAX_DESCRIPTORS, MAX_ENTRIES, STAT_BLOCK_BYTES, pause_between_entries
from sandbox_server.agent.kernel.trash import FOLDER_FLAGS, open_dir

_MAX_HARD_LINKS = 100_000

_Identity = Tuple[int, int]


@dataclasses.dataclass
class DiskUsage:
    """The measured disk usage.

    Attributes:
        size_bytes: the space, in bytes.
        entries: the number of files and folders.
        is_whole: whether everything was measured. Otherwise the real usage may be larger.
    """

    size_bytes: int = 0
    entries: int = 0
    is_whole: bool = True


class DiskMeter:
    """Measures one slot.

    Args:
        until_s: the deadline on the monotonic clock, in seconds.
        is_stopped: returns whether the result is no longer needed.
    """

    def __init__(self, until_s: float, is_stopped: Callable[[], bool]) -> None:
        self._until_s = until_s
        self._is_stopped = is_stopped
        self._counted_hard_links: Set[_Identity] = set()
        self.use = DiskUsage()

    def add_tree(self, path: str) -> None:
        """Add a folder of the agent and everything in it. A missing folder counts as empty."""
        try:
            top = open_dir(path, None)
        except OSError:
            return
        self._walk(top)

    def _walk(self, top: int) -> None:
        stack: List[Tuple[_Identity, List[str]]] = []
        current = top
        try:
            stack.append((_identify(current), self._list_folders(current)))
            while stack:
                names = stack[-1][1]
                if names and not self._must_stop():
                    below = self._open_subfolder(names.pop(), current)
                    if below >= 0:
                        os.close(current)
                        current = below
                        stack.append((_identify(current), self._list_folders(current)))
                    continue
                stack.pop()
                if stack:
                    current = self._open_parent(current, stack[-1][0])
                    if current < 0:
                        self.use.is_whole = False  # The slot has moved the folder meanwhile.
                        return
        finally:
            if current >= 0:
                os.close(current)

    @staticmethod
    def _open_subfolder(name: str, parent: int) -> int:
        try:
            return open_dir(name, parent)
        except OSError:
            return -1  # Deleted or replaced by something else since it was listed.

    @staticmethod
    def _open_parent(current: int, expected: _Identity) -> int:
        """Close a folder and open its parent. Returns -1 if the parent is not the expected folder."""
        try:
            parent = os.open("..", FOLDER_FLAGS, dir_fd=current)
        except OSError:
            parent = -1
        finally:
            os.close(current)
        if parent >= 0 and _identify(parent) != expected:
            os.close(parent)
            return -1
        return parent

    def _list_folders(self, folder: int) -> List[str]:
        """Count the entries of an open folder. Returns the names of the folders in it."""
        folders: List[str] = []
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if self._must_stop():
                        break
                    self._count_entry(entry, folders)
        except OSError:
            self.use.is_whole = False
        return folders

    def _count_entry(self, entry: os.DirEntry[str], folders: List[str]) -> None:
        self.use.entries += 1
        pause_between_entries(self.use.entries)
        try:
            info = entry.stat(follow_symlinks=False)
        except OSError:
            return  # Deleted since the folder was listed.
        if stat.S_ISDIR(info.st_mode):
            folders.append(entry.name)
        elif info.st_nlink > 1:
            known = (info.st_dev, info.st_ino)
            if known in self._counted_hard_links:
                return
            if len(self._counted_hard_links) < _MAX_HARD_LINKS:
                self._counted_hard_links.add(known)
        self.use.size_bytes += info.st_blocks * STAT_BLOCK_BYTES

    def _must_stop(self) -> bool:
        if self.use.entries >= MAX_ENTRIES or time.monotonic() > self._until_s or self._is_stopped():
            self.use.is_whole = False
            return True
        return False

    def add_deleted_files(self, pids: Sequence[int], devices: Set[int]) -> None:
        """Add the deleted regular files that processes still have open.

        Args:
            pids: the processes.
            devices: the file systems that count.
        """
        files: Dict[_Identity, int] = {}
        left = MAX_DESCRIPTORS
        for pid in pids:
            folder = "/proc/%d/fd" % pid
            try:
                names = os.listdir(folder)
            except OSError:
                continue
            for name in names[: max(0, left)]:
                try:
                    info = os.stat(os.path.join(folder, name))  # Information about the open file, not about a path.
                except OSError:
                    continue
                if stat.S_ISREG(info.st_mode) and not info.st_nlink and info.st_dev in devices:
                    files[info.st_dev, info.st_ino] = info.st_blocks * STAT_BLOCK_BYTES
            left -= len(names)
        if left < 0:
            self.use.is_whole = False
        self.use.size_bytes += sum(files.values())


def _identify(folder: int) -> _Identity:
    info = os.fstat(folder)
    return info.st_dev, info.st_ino


def measure_disk(folders: Sequence[str], init_pid: int, until_s: float, is_stopped: Callable[[], bool]) -> DiskUsage:
    """Measure the disk usage of one slot: its folders, and the deleted files that its processes have open. This blocks, so call it in a thread.

    Args:
        folders: the folders of the agent that the slot fills.
        init_pid: the first process of the slot.
        until_s: the deadline on the monotonic clock, in seconds.
        is_stopped: returns whether the result is no longer needed.
    """
    meter = DiskMeter(until_s, is_stopped)
    devices = set()
    for folder in folders:
        try:
            devices.add(os.lstat(folder).st_dev)
        except OSError:
            continue  # Not created yet, or already deleted.
        meter.add_tree(folder)
    meter.add_deleted_files(sorted(process_table.find_trees(process_table.read_process_table(), [init_pid])), devices)
    return meter.use
