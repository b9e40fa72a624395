"""What of a slot can be seen from outside it: processes by user, name and namespace, control groups, files and IPC by owner, sockets by name."""

from __future__ import annotations

import os

from sandbox_server.agent.execution.slot_runtime import SlotRuntime
from sandbox_server.agent.inslot.leftover_probe import sysv_key
from sandbox_server.agent.isolation.shared_places import SHARED_PLACES, list_ipc_ids, list_owned_names, remove_message_queue, remove_sysv_object
from sandbox_server.agent.kernel import procfs

_SYSV = ("shm", "sem", "msg")


class Outside:
    """A look at one body from the agent's side, as long as it lives and after.

    Args:
        body: whose leftovers are looked for.
        name: what everything that was planted carries.
        inode: of a listening socket that was planted; 0: none.
    """

    def __init__(self, body: SlotRuntime, name: str, inode: int) -> None:
        self._uid = body.uid
        self._root = body.dirs.root
        self._name = name
        self._inode = inode
        self._leaves = body.groups.leaves.paths() if body.groups.leaves is not None else []
        self._namespace = -1
        path = "/proc/%d/ns/pid" % body.init_pid
        if procfs.inode_of(path) not in (0, procfs.inode_of("/proc/self/ns/pid")):
            # Held open, so that no new namespace gets its number.
            self._namespace = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Nothing more is looked for."""
        if self._namespace >= 0:
            os.close(self._namespace)
            self._namespace = -1

    def look(self) -> dict[str, str]:
        """What is there: kind -> what was seen. Reads files of the kernel and walks shared folders: for a thread."""
        seen: dict[str, str] = {}
        self._processes(seen)
        for path in self._leaves:
            pids = procfs.pids_in_group(path)
            if pids:
                seen["host_cgroup"] = "%s holds %d processes" % (os.path.basename(path), len(pids))
        if os.path.lexists(self._root):
            seen["host_folder"] = self._root
        self._files(seen)
        self._ipc(seen)
        self._sockets(seen)
        mounts = procfs.mounts_under(self._root)
        if mounts:
            seen["host_mount"] = mounts[0]
        return seen

    def _processes(self, seen: dict[str, str]) -> None:
        if self._uid is not None:
            living = procfs.pids_of_uid(self._uid)
            if living:
                seen["host_process"] = "user %d has %d processes" % (self._uid, len(living))
        for pid in procfs.pids():
            if procfs.has_argument(pid, self._name):
                seen["host_process"] = "process %d" % pid
            elif self._namespace >= 0 and procfs.inode_of("/proc/%d/ns/pid" % pid) == os.fstat(self._namespace).st_ino:
                seen["host_namespace"] = "process %d" % pid

    def _files(self, seen: dict[str, str]) -> None:
        for place in SHARED_PLACES:
            named = [name for name in _names(place) if self._name in name]
            if named:
                seen["host_file"] = os.path.join(place, named[0])
        if self._uid is not None:
            found = list_owned_names(self._uid)
            if found:
                seen["host_file"] = "%s and %d more of user %d" % (ascii(found[0]), len(found) - 1, self._uid)

    def _ipc(self, seen: dict[str, str]) -> None:
        for kind in _SYSV:
            if list_ipc_ids(kind, self._uid, sysv_key(self._name, kind)):
                seen["host_ipc"] = "System V %s" % kind

    def _sockets(self, seen: dict[str, str]) -> None:
        if procfs.has_line("/proc/net/unix", -1, b"@" + self._name.encode()):
            seen["host_socket"] = "@" + self._name
        elif self._inode and procfs.has_line("/proc/net/tcp", 9, b"%d" % self._inode):
            seen["host_socket"] = "a listening socket"

    def tidy(self) -> None:
        """Remove what a reset has left of a planting in the places that all users share. Only names that this process made up are touched."""
        for place in SHARED_PLACES:
            for name in _names(place):
                if self._name in name and not os.path.isdir(os.path.join(place, name)):
                    os.unlink(os.path.join(place, name))
        for kind in _SYSV:
            for number in list_ipc_ids(kind, self._uid, sysv_key(self._name, kind)):
                remove_sysv_object(kind, number)
        remove_message_queue("/" + self._name)


def _names(place: str) -> list[str]:
    try:
        return os.listdir(place)
    except OSError:
        return []  # there is no such place here
