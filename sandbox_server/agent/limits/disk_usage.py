"""What a slot takes of a disk, found by looking: its folders, and the files that are deleted but still open in its processes.

Symbolic links are not followed, and no path of the slot's is opened: a folder is opened by its name in its open parent, and left by `..` only if that
is the folder it was entered from. So neither the depth of a tree nor a slot that moves folders meanwhile leads anywhere else. The look pauses often and
ends in time; what it has not come to then is not counted.
"""

from __future__ import annotations

import dataclasses
import os
import stat
import time
from typing import Callable, Dict, List, Sequence, Set, Tuple

from sandbox_server.agent.init import process_table
from sandbox_server.agent.kernel.trash import open_dir

MAX_ENTRIES = 2_000_000
_MOST_DESCRIPTORS = 20_000
_MOST_LINKED = 100_000
_BLOCK_BYTES = 512
_BATCH = 500
_PAUSE_S = 0.005

_Identity = Tuple[int, int]


@dataclasses.dataclass
class DiskUse:
    """What was found. `is_whole`: everything was looked at; else it is at least this."""

    size_bytes: int = 0
    entries: int = 0
    is_whole: bool = True


class DiskMeter:
    """Measures one slot.

    Args:
        until: the time (monotonic, seconds) at which it ends whatever is left.
        stopped: says that nobody waits for the answer any more.
    """

    def __init__(self, until: float, stopped: Callable[[], bool]) -> None:
        self._until = until
        self._stopped = stopped
        self._linked: Set[_Identity] = set()
        self.use = DiskUse()

    def add_tree(self, path: str) -> None:
        """Add a folder of the agent's, and all that a slot has put into it. Missing is nothing."""
        try:
            top = open_dir(path, None)
        except OSError:
            return
        self._walk(top)

    def _walk(self, top: int) -> None:
        stack: List[Tuple[_Identity, List[str]]] = []
        current = top
        try:
            stack.append((_identity(current), self._list(current)))
            while stack:
                names = stack[-1][1]
                if names and not self._is_over():
                    below = self._enter(names.pop(), current)
                    if below >= 0:
                        os.close(current)
                        current = below
                        stack.append((_identity(current), self._list(current)))
                    continue
                stack.pop()
                if stack:
                    current = self._leave(current, stack[-1][0])
                    if current < 0:
                        self.use.is_whole = False  # the slot moved the folder meanwhile
                        return
        finally:
            if current >= 0:
                os.close(current)

    @staticmethod
    def _enter(name: str, parent: int) -> int:
        try:
            return open_dir(name, parent)
        except OSError:
            return -1  # gone, or exchanged for something else, since it was seen

    @staticmethod
    def _leave(current: int, expected: _Identity) -> int:
        """Go to the parent folder, closing this one; -1: it is another than the one we came from."""
        try:
            parent = os.open("..", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=current)
        except OSError:
            parent = -1
        finally:
            os.close(current)
        if parent >= 0 and _identity(parent) != expected:
            os.close(parent)
            return -1
        return parent

    def _list(self, folder: int) -> List[str]:
        """Count what is in an open folder; the names of the folders in it."""
        folders: List[str] = []
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if self._is_over():
                        break
                    self._count(entry, folders)
        except OSError:
            self.use.is_whole = False
        return folders

    def _count(self, entry: os.DirEntry[str], folders: List[str]) -> None:
        self.use.entries += 1
        if self.use.entries % _BATCH == 0:
            time.sleep(_PAUSE_S)
        try:
            info = entry.stat(follow_symlinks=False)
        except OSError:
            return  # gone since the listing
        if stat.S_ISDIR(info.st_mode):
            folders.append(entry.name)
        elif info.st_nlink > 1:
            known = (info.st_dev, info.st_ino)
            if known in self._linked:
                return
            if len(self._linked) < _MOST_LINKED:
                self._linked.add(known)
        self.use.size_bytes += info.st_blocks * _BLOCK_BYTES

    def _is_over(self) -> bool:
        if self.use.entries >= MAX_ENTRIES or time.monotonic() > self._until or self._stopped():
            self.use.is_whole = False
            return True
        return False

    def add_deleted_files(self, pids: Sequence[int], devices: Set[int]) -> None:
        """Add the regular files on these file systems that processes have open and that have no name any more."""
        files: Dict[_Identity, int] = {}
        left = _MOST_DESCRIPTORS
        for pid in pids:
            folder = "/proc/%d/fd" % pid
            try:
                names = os.listdir(folder)
            except OSError:
                continue
            for name in names[: max(0, left)]:
                try:
                    info = os.stat(os.path.join(folder, name))  # of the open file, whatever it was called
                except OSError:
                    continue
                if stat.S_ISREG(info.st_mode) and not info.st_nlink and info.st_dev in devices:
                    files[info.st_dev, info.st_ino] = info.st_blocks * _BLOCK_BYTES
            left -= len(names)
        if left < 0:
            self.use.is_whole = False
        self.use.size_bytes += sum(files.values())


def _identity(folder: int) -> _Identity:
    info = os.fstat(folder)
    return info.st_dev, info.st_ino


def measure_disk(folders: Sequence[str], init_pid: int, until: float, stopped: Callable[[], bool]) -> DiskUse:
    """What one slot takes: its folders, and what its processes have open without a name. For a thread.

    Args:
        folders: the agent's folders that the slot fills.
        init_pid: its first process.
        until: the time (monotonic, seconds) at which the answer is due.
        stopped: says that nobody waits for it any more.
    """
    meter = DiskMeter(until, stopped)
    devices = set()
    for folder in folders:
        try:
            devices.add(os.lstat(folder).st_dev)
        except OSError:
            continue  # not made yet, or thrown away
        meter.add_tree(folder)
    meter.add_deleted_files(sorted(process_table.find_trees(process_table.read_process_table(), [init_pid])), devices)
    return meter.use
