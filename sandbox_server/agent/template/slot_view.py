"""Gives a forked init the groups, namespaces, mounts and network of its slot, before it becomes the init of the slot and drops its privileges.

All file systems of the machine have been mounted in the template. What differs between slots is mounted here: what the agent hands over as detached mounts, and
new instances of the file systems of the kernel. No path that a slot controls is used before the privileges are dropped, except that the entries of the
workspace which become read-only are found with the file permissions of the slot, and without following a link.
"""

from __future__ import annotations

import _socket as socket
import os

from sandbox_server.agent.init import init, private_mounts, privileges
from sandbox_server.agent.template import system_calls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, List, Mapping, Sequence, Tuple

    Entry = Tuple[str, int, int]  # its name at the top of the workspace, its device and its inode

_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 2, 4, 8, 32, 0x1000, 0x4000, 1 << 18
#: The machine's settings and controls in /proc. bubblewrap makes those of them read-only that it could change itself.
_CONTROLS = ("/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/proc/bus")
#: How many pseudo-terminals a slot may have open. The kernel counts those of all slots together.
_MAX_PSEUDO_TERMINALS = 64
_ENTRY_FLAGS = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER_FLAGS, _WRITE = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, os.O_WRONLY | os.O_CLOEXEC


def list_read_only_controls() -> List[str]:
    """Return which of the machine's settings and controls are read-only in the /proc that bubblewrap has mounted."""
    return [path for path in _CONTROLS if os.access(path, os.F_OK) and os.statvfs(path).f_flag & os.ST_RDONLY]


def enter_slot(request: Mapping[str, Any], mount_fds: Sequence[int], join_fds: Sequence[int], controls: Sequence[str]) -> int:
    """Make this process, which has just been forked, a member of its slot.

    Args:
        request: `network`: whether the slot has its own network namespace; `view`: what the slot sees, see `_mount_view`, or None if it sees the same as the
            template.
        mount_fds: the detached mounts, in the order of `mounts` and then of `read_only` of the view.
        join_fds: descriptors of the control groups that the process joins.
        controls: what becomes read-only in the slot's /proc.

    Returns:
        A descriptor of `oom_score_adj` of this process, or -1 if it cannot be written.

    Raises:
        OSError: the kernel has refused something. The process must then end.
    """
    os.setsid()
    system_calls.set_process_name(b"slot-init")
    for fd in join_fds:
        os.write(fd, b"0")
    view = request["view"]
    if view is None or view["inside_uid"] is None:  # Those of all slots of an ordinary user would leave this user too few, so they share the empty one here.
        system_calls.join_new_session_keyring(needs_new=False)
    if view is None:
        return init.open_oom_adjustment()
    system_calls.unshare(system_calls.CLONE_NEWCGROUP)  # only now: the root of the namespace is the group that the process is in
    private_mounts.mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    _mount_proc(controls)
    own_folder = os.open("/proc/self", _FOLDER_FLAGS)
    oom_fd = init.open_oom_adjustment()
    if view["inside_uid"] is not None:
        _map_user(own_folder, 0, 0)
    system_calls.set_host_name(b"slot")
    _mount_view(view, mount_fds)
    if request["network"]:
        _start_loopback()
    if view["inside_uid"] is not None:
        _protect_init()
        _enter_last_user_namespace(own_folder, view["inside_uid"])
    os.chdir("/")
    return oom_fd


def _mount_view(view: Mapping[str, Any], mount_fds: Sequence[int]) -> None:
    """Mount what belongs to the slot alone.

    Args:
        view: `shm`: the options of its /dev/shm; `mounts`: the mount points of the detached mounts; `workspace`: the path of its workspace; `read_only`: the
            entries of the workspace that the slot cannot change; `uid`: its user, or None if this process has the file permissions of the slot; `inside_uid`:
            its user in its own user namespace, or None if it has none.
        mount_fds: the detached mounts.
    """
    private_mounts.mount("devpts", "/dev/pts", "devpts", _MS_NOSUID | _MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620,max=%d" % _MAX_PSEUDO_TERMINALS)
    private_mounts.mount("tmpfs", "/dev/shm", "tmpfs", _MS_NOSUID | _MS_NODEV, view["shm"])
    targets: List[str] = view["mounts"]
    for target, fd in zip(targets, mount_fds):
        system_calls.attach_mount(fd, target)
    if view["read_only"]:
        _attach_read_only(view["workspace"], view["read_only"], mount_fds[len(targets) :], view["uid"])


def _mount_proc(controls: Sequence[str]) -> None:
    private_mounts.mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    for path in controls:
        private_mounts.mount(path, path, None, _MS_BIND)
        private_mounts.mount("none", path, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)


def _attach_read_only(workspace: str, entries: Sequence[Entry], mount_fds: Sequence[int], uid: int | None) -> None:
    """Attach the read-only mounts of entries of the workspace. `read_only_mounts.check_read_only` checks them afterwards."""
    if uid is not None:
        system_calls.set_file_uid(uid)  # Root without capabilities for files cannot search the workspace, and needs no other rights in it than the slot.
    for (name, _, _), mount_fd in zip(entries, mount_fds):
        entry = os.open(workspace + "/" + name, _ENTRY_FLAGS)
        try:
            system_calls.attach_mount(mount_fd, "", entry)
        finally:
            os.close(entry)
    if uid is not None:
        system_calls.set_file_uid(os.getuid())


def _start_loopback() -> None:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
    try:
        system_calls.start_loopback(sock.fileno())
    finally:
        sock.close()


def _map_user(own_folder: int, inside: int, outside: int) -> None:
    """Map the one user and group of this new user namespace.

    Args:
        own_folder: a descriptor of the folder of this process in /proc.
        inside: the user and group in the namespace.
        outside: the same in the namespace around it. They must be those of this process.
    """
    mapping = b"%d %d 1" % (inside, outside)
    for name, text in (("setgroups", b"deny"), ("uid_map", mapping), ("gid_map", mapping)):
        _write_file(name, text, own_folder)


def _protect_init() -> None:
    """Make the folder of init in /proc read-only, and hide which descriptors init has.

    Init has the user of the slot and is not executed after its user namespace was created, so some of its files there belong to the user of the slot. Through
    them, a slot could slow its init down, or make the kernel kill it first. The kernel itself refuses access to its memory and to what it has open.
    """
    private_mounts.mount("/proc/1", "/proc/1", None, _MS_BIND)
    private_mounts.mount("none", "/proc/1", None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    private_mounts.mount("tmpfs", "/proc/1/fd", "tmpfs", _MS_RDONLY | _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, "mode=0000,size=4096")
    private_mounts.mount("/proc/1/fd", "/proc/1/task/1/fd", None, _MS_BIND)


def _enter_last_user_namespace(own_folder: int, uid: int) -> None:
    """Move into a second user namespace, from which nothing that was mounted can be changed, and in which the slot is no root. No further one can be created.

    /dev/pts can only be mounted where there is a root user, so the first namespace has one.
    """
    _write_file("/proc/sys/user/max_user_namespaces", b"1")
    system_calls.unshare(system_calls.CLONE_NEWUSER)
    _map_user(own_folder, uid, 0)
    privileges.empty_bounding_set()


def _write_file(path: str, text: bytes, folder: int | None = None) -> None:
    fd = os.open(path, _WRITE, dir_fd=folder)
    try:
        os.write(fd, text)
    finally:
        os.close(fd)
