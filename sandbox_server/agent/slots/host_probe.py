"""Finds from outside of a slot what its processes have left behind: processes, control groups, files, IPC objects, sockets and mounts."""

from __future__ import annotations

import os

from sandbox_server.agent.execution.slot_runtime import SlotRuntime
from sandbox_server.agent.inslot.leftover_probe import SYSV_KINDS, sysv_key
from sandbox_server.agent.isolation.shared_folders import SHARED_FOLDERS, list_ipc_ids, list_owned_names, remove_message_queue, remove_sysv_object
from sandbox_server.agent.kernel import procfs


class HostProbe:
    """Finds what belongs to one slot runtime, while it runs and after its end.

    Args:
        runtime: the slot runtime.
        name: a random name that everything a verification has planted carries.
        inode: the inode of a listening socket that the verification has planted; 0: there is none.
    """

    def __init__(self, runtime: SlotRuntime, name: str, inode: int) -> None:
        self._uid = runtime.uid
        self._root = runtime.dirs.root
        self._name = name
        self._inode = inode
        self._leaves = runtime.groups.leaves.paths() if runtime.groups.leaves is not None else []
        self._namespace = -1
        path = "/proc/%d/ns/pid" % runtime.init_pid
        if procfs.inode_of(path) not in (0, procfs.inode_of("/proc/self/ns/pid")):
            # While it is open, no new namespace can get the same inode number.
            self._namespace = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def close_probe(self) -> None:
        """Close the descriptor of the namespace."""
        if self._namespace >= 0:
            os.close(self._namespace)
            self._namespace = -1

    def find_leftovers(self) -> dict[str, str]:
        """Return what is there: kind -> details. This reads files of the kernel and walks shared folders, so it is meant for a thread."""
        found: dict[str, str] = {}
        self._find_processes(found)
        for path in self._leaves:
            # The next runtime may have the same group. A process cannot leave its pid namespace, so those in another one are not of this runtime.
            pids = [pid for pid in procfs.pids_in_group(path) if not self._is_in_other_namespace(pid)]
            if pids:
                found["host_cgroup"] = "%s holds %d processes" % (os.path.basename(path), len(pids))
        if os.path.lexists(self._root):
            found["host_folder"] = self._root
        self._find_files(found)
        self._find_ipc(found)
        self._find_sockets(found)
        mounts = procfs.mounts_under(self._root)
        if mounts:
            found["host_mount"] = mounts[0]
        return found

    def _find_processes(self, found: dict[str, str]) -> None:
        if self._uid is not None:
            living = procfs.pids_of_uid(self._uid)
            if living:
                found["host_process"] = "user %d has %d processes" % (self._uid, len(living))
        for pid in procfs.pids():
            if procfs.has_argument(pid, self._name):
                found["host_process"] = "process %d" % pid
            elif self._namespace >= 0 and procfs.inode_of("/proc/%d/ns/pid" % pid) == os.fstat(self._namespace).st_ino:
                found["host_namespace"] = "process %d" % pid

    def _is_in_other_namespace(self, pid: int) -> bool:
        return self._namespace >= 0 and procfs.inode_of("/proc/%d/ns/pid" % pid) not in (0, os.fstat(self._namespace).st_ino)

    def _find_files(self, found: dict[str, str]) -> None:
        for folder in SHARED_FOLDERS:
            named = [name for name in _list_names(folder) if self._name in name]
            if named:
                found["host_file"] = os.path.join(folder, named[0])
        if self._uid is not None:
            owned_names = list_owned_names(self._uid)
            if owned_names:
                found["host_file"] = "%s and %d more of user %d" % (ascii(owned_names[0]), len(owned_names) - 1, self._uid)

    def _find_ipc(self, found: dict[str, str]) -> None:
        for kind in SYSV_KINDS:
            if list_ipc_ids(kind, self._uid, sysv_key(self._name, kind)):
                found["host_ipc"] = "System V %s" % kind

    def _find_sockets(self, found: dict[str, str]) -> None:
        if procfs.has_line("/proc/net/unix", -1, b"@" + self._name.encode()):
            found["host_socket"] = "@" + self._name
        elif self._inode and procfs.has_line("/proc/net/tcp", 9, b"%d" % self._inode):
            found["host_socket"] = "a listening socket"

    def remove_leftovers(self) -> None:
        """Remove from the folders that all users share what a reset has left of the planted objects. Only objects with the random name are removed."""
        for folder in SHARED_FOLDERS:
            for name in _list_names(folder):
                if self._name in name and not os.path.isdir(os.path.join(folder, name)):
                    os.unlink(os.path.join(folder, name))
        for kind in SYSV_KINDS:
            for number in list_ipc_ids(kind, self._uid, sysv_key(self._name, kind)):
                remove_sysv_object(kind, number)
        remove_message_queue("/" + self._name)


def _list_names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []  # this machine has no such folder
