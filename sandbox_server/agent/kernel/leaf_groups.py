"""The leaf control groups of one slot. Each call runs in a leaf, so that exactly the processes of the call can be listed, stopped and killed."""

from __future__ import annotations

import errno
import os
from typing import Callable

from sandbox_server.agent.kernel.processor_times import GroupProcessorTimes
from sandbox_server.agent.kernel.slot_limit_groups import find_number, open_procs, write_control_file

_READ_BYTES = 65536
_TWO_PIDS_BYTES = 32  # A pid has at most 10 digits, and each is followed by a line feed.


class Leaf:
    """The control group of the processes of one call.

    Args:
        path: the folder of the group.
        procs_fd: see below. This object closes it.
        processor_times: see below.
        slot_processor_times: the processor times of all leaves of the slot together.

    Attributes:
        procs_fd: descriptor of `cgroup.procs`. A process that writes to it joins the group.
        processor_times: the processor times of the processes in the leaf.
        is_in_use: whether a call uses the leaf.
        is_closed: whether this object may no longer act on the group, because its slot runtime has ended.
    """

    __slots__ = ("_was_frozen", "is_closed", "is_in_use", "path", "processor_times", "procs_fd", "slot_processor_times")

    def __init__(self, path: str, procs_fd: int, processor_times: GroupProcessorTimes, slot_processor_times: GroupProcessorTimes) -> None:
        self.path = path
        self.procs_fd = procs_fd
        self.processor_times = processor_times
        self.slot_processor_times = slot_processor_times
        self.is_in_use = False
        self.is_closed = False
        self._was_frozen = False

    @classmethod
    def create_leaf(cls, path: str, slot_processor_times: GroupProcessorTimes) -> Leaf:
        """Create the group, and return the leaf."""
        os.mkdir(path)
        try:
            return cls(path, open_procs(path), GroupProcessorTimes(path), slot_processor_times)
        except OSError:
            os.rmdir(path)
            raise

    def renew_leaf(self, slot_processor_times: GroupProcessorTimes) -> Leaf:
        """Return a new object for the same, empty group, for the next slot runtime. What still refers to this object can no longer reach the group."""
        if self._was_frozen:
            self.freeze(False)  # What has frozen it may have been cut off by the end of the slot runtime.
        procs_fd, self.procs_fd, self.is_closed = self.procs_fd, -1, True
        return Leaf(self.path, procs_fd, self.processor_times.renew_files(), slot_processor_times)

    def close_leaf(self) -> None:
        """Close the files of the group."""
        if self.procs_fd >= 0:
            os.close(self.procs_fd)
        self.procs_fd, self.is_closed = -1, True
        self.processor_times.close_files()

    def _file(self, name: str) -> str:
        if self.is_closed:
            raise FileNotFoundError(errno.ENOENT, "the slot runtime of this control group has ended", self.path)
        return os.path.join(self.path, name)

    def pids(self) -> list[int]:
        """Return the processes in the leaf."""
        content = b""
        while True:
            chunk = os.pread(self.procs_fd, _READ_BYTES, len(content))
            if not chunk:
                return [int(word) for word in content.split()]
            content += chunk

    def has_one_process(self) -> bool:
        """Return whether at most one process is in the leaf."""
        return os.pread(self.procs_fd, _TWO_PIDS_BYTES, 0).count(b"\n") <= 1

    def populated(self) -> bool:
        """Return whether any process is in the leaf."""
        return self._read_event(b"populated") != 0

    def freeze(self, frozen: bool) -> None:
        """Begin to stop all processes in the leaf, or continue them."""
        self._was_frozen = True
        write_control_file(self._file("cgroup.freeze"), "1" if frozen else "0")

    def is_frozen(self) -> bool:
        """Return whether all processes in the leaf have been stopped."""
        return self._read_event(b"frozen") != 0

    def kill(self) -> None:
        """Send SIGKILL to all processes in the leaf. The kernel also kills the ones that are forked at the same time."""
        write_control_file(self._file("cgroup.kill"), "1")

    def _read_event(self, name: bytes) -> int:
        with open(self._file("cgroup.events"), "rb") as file:
            return find_number(file.read(), name)


class SlotLeaves:
    """The leaves of one slot.

    Init is a member of the leaf of the process that it started last, because children are created in the group of their parent. Moving init to another leaf
    takes milliseconds, as the kernel synchronizes all processors. Therefore a leaf that contains only init is used again without a move.

    Args:
        folder: the folder of the leaves.
        remove_group: removes a control group as soon as it is empty.
        processor_times: the processor times of all leaves together.
        home: init moves to this leaf before the leaf that it is in is killed.
        first: init is started in this leaf, so that the first call needs no move.
        leaf_count: how many leaves have been created in the folder.
    """

    def __init__(
        self, folder: str, remove_group: Callable[[str], None], processor_times: GroupProcessorTimes, home: Leaf, first: Leaf, leaf_count: int
    ) -> None:
        self._folder = folder
        self._remove_group = remove_group
        self._processor_times = processor_times
        self._home = home
        self._current = first
        self._leaves = [first]
        self._leaf_count = leaf_count

    @classmethod
    def create_leaves(cls, folder: str, remove_group: Callable[[str], None]) -> SlotLeaves:
        """Create the folder and the first leaves.

        Raises:
            OSError: the kernel has refused it. Nothing is left of them.
        """
        os.mkdir(folder)
        times = GroupProcessorTimes(folder)
        leaves: list[Leaf] = []
        try:
            for number in (1, 2):
                leaves.append(Leaf.create_leaf(os.path.join(folder, str(number)), times))
        except OSError:
            for leaf in leaves:
                leaf.close_leaf()
                remove_group(leaf.path)
            remove_group(folder)
            raise
        home, first = leaves
        return cls(folder, remove_group, times, home, first, 2)

    def are_empty(self) -> bool:
        """Return whether no process is left in any leaf."""
        with open(os.path.join(self._folder, "cgroup.events"), "rb") as file:
            return find_number(file.read(), b"populated") == 0

    def renew_leaves(self) -> SlotLeaves:
        """Return the leaves of the next slot runtime: two of these, which must be empty. The others are removed. This object can no longer be used."""
        first, *others = self._leaves
        for leaf in others:
            self._close_and_remove(leaf)
        self._leaves.clear()
        times = self._processor_times.renew_files()
        return SlotLeaves(self._folder, self._remove_group, times, self._home.renew_leaf(times), first.renew_leaf(times), self._leaf_count)

    def _close_and_remove(self, leaf: Leaf) -> None:
        leaf.close_leaf()
        self._remove_group(leaf.path)

    def first_procs_fd(self) -> int:
        """Return the descriptor through which init joins its first leaf. This object closes it."""
        return self._current.procs_fd

    def take_leaf(self) -> tuple[Leaf, int]:
        """Choose or create the leaf of a new call.

        Returns:
            The leaf, and the descriptor through which init must join it, or -1 if init is already in it.
        """
        current = self._current
        if not current.is_in_use and current is not self._home and current.has_one_process():
            current.is_in_use = True
            return current, -1
        for leaf in self._leaves:
            if not leaf.is_in_use and leaf is not current and not leaf.populated():
                leaf.is_in_use = True
                break
        else:
            self._leaf_count += 1
            leaf = Leaf.create_leaf(os.path.join(self._folder, str(self._leaf_count)), self._processor_times)
            leaf.is_in_use = True
            self._leaves.append(leaf)
        self._current = leaf
        return leaf, leaf.procs_fd

    def move_init_out_of(self, leaf: Leaf) -> int:
        """Make sure that init is not in a leaf that is about to be killed.

        Returns:
            The descriptor through which init must leave it, or -1 if init is in another leaf.
        """
        if self._current is not leaf:
            return -1
        self._current = self._home
        return self._home.procs_fd

    def paths(self) -> list[str]:
        """Return the folder of every leaf."""
        return [leaf.path for leaf in [self._home, *self._leaves]]

    def kill_all(self) -> int:
        """Send SIGKILL to all processes in all leaves. Returns how many processes still exist."""
        left = 0
        for leaf in [self._home, *self._leaves]:
            if leaf.populated():
                leaf.kill()
                left += len(leaf.pids())
        return left

    def remove_leaves(self) -> None:
        """Remove all leaves of an ended slot."""
        for leaf in [self._home, *self._leaves]:
            self._close_and_remove(leaf)
        self._processor_times.close_files()
        self._leaves.clear()
        self._remove_group(self._folder)
