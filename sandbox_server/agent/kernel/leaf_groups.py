"""The leaf control groups of one slot. Each call runs in a leaf, so that exactly the processes of the call can be listed, stopped and killed."""

from __future__ import annotations

import os
from typing import Callable

from sandbox_server.agent.kernel.processor_times import GroupProcessorTimes
from sandbox_server.agent.kernel.slot_limit_groups import find_number, open_procs, write_control_file

_READ_BYTES = 65536
_TWO_PIDS_BYTES = 32  # A pid has at most 10 digits, and each is followed by a line feed.


class Leaf:
    """The control group of the processes of one call.

    Args:
        path: the folder of the group, which is created.
        slot_processor_times: the processor times of all leaves of the slot together.

    Attributes:
        procs_fd: descriptor of `cgroup.procs`. A process that writes to it joins the group.
        processor_times: the processor times of the processes in the leaf.
        is_in_use: whether a call uses the leaf.
    """

    __slots__ = ("is_in_use", "path", "processor_times", "procs_fd", "slot_processor_times")

    def __init__(self, path: str, slot_processor_times: GroupProcessorTimes) -> None:
        os.mkdir(path)
        self.path = path
        self.procs_fd = open_procs(path)
        self.processor_times = GroupProcessorTimes(path)
        self.slot_processor_times = slot_processor_times
        self.is_in_use = True

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
        write_control_file(os.path.join(self.path, "cgroup.freeze"), "1" if frozen else "0")

    def is_frozen(self) -> bool:
        """Return whether all processes in the leaf have been stopped."""
        return self._read_event(b"frozen") != 0

    def kill(self) -> None:
        """Send SIGKILL to all processes in the leaf. The kernel also kills the ones that are forked at the same time."""
        write_control_file(os.path.join(self.path, "cgroup.kill"), "1")

    def _read_event(self, name: bytes) -> int:
        with open(os.path.join(self.path, "cgroup.events"), "rb") as file:
            return find_number(file.read(), name)


class SlotLeaves:
    """The leaves of one slot.

    Init is a member of the leaf of the process that it started last, because children are created in the group of their parent. Moving init to another leaf
    takes milliseconds, as the kernel synchronizes all processors. Therefore a leaf that contains only init is used again without a move.

    Args:
        folder: the folder of the leaves, which is created.
        remove_group: removes a control group as soon as it is empty.
    """

    def __init__(self, folder: str, remove_group: Callable[[str], None]) -> None:
        self._folder = folder
        self._remove_group = remove_group
        os.mkdir(folder)
        self._processor_times = GroupProcessorTimes(folder)
        self._leaf_count = 0
        #: Init moves to this leaf before the leaf that it is in is killed.
        self._home = self._make_leaf()
        self._home.is_in_use = False
        # Init is started in this leaf, so that the first call needs no move.
        self._current = self._make_leaf()
        self._current.is_in_use = False
        self._leaves = [self._current]

    def _make_leaf(self) -> Leaf:
        self._leaf_count += 1
        return Leaf(os.path.join(self._folder, str(self._leaf_count)), self._processor_times)

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
            leaf = self._make_leaf()
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
            os.close(leaf.procs_fd)
            leaf.procs_fd = -1
            leaf.processor_times.close_files()
            self._remove_group(leaf.path)
        self._processor_times.close_files()
        self._leaves.clear()
        self._remove_group(self._folder)
