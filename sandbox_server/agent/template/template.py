"""The template of slots: a process that forks their inits, so that none of them has to start an interpreter and to mount the file systems of the machine.

The agent starts the template as a new program, whose memory has never held anything of the agent. The template has one thread, and its socket is its only
connection. It reads messages of the agent alone: it runs nothing, opens nothing that a slot has chosen, and leaves everything that concerns one slot to the
process that it forks. The parent of this process is the agent, which so learns how it ends, and the process outlives the template.
"""

from __future__ import annotations

import _socket as socket
import ctypes
import fcntl
import gc
import os
import select
import struct
import sys
from marshal import loads

from sandbox_server.agent.init import init, priority, private_mounts, privileges, read_only_mounts, spawned_trees
from sandbox_server.agent.init.reports import FAILED, REPORT
from sandbox_server.agent.template import detached_mounts, shared_memory, slot_view, system_calls
from sandbox_server.agent.template.messages import ANSWER, MAX_DESCRIPTORS, MESSAGE_BYTES, REQUEST

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from typing import Any, List, Mapping, NoReturn, Optional, Sequence, Tuple

    Folder = Tuple[str, bool, Optional[Tuple[int, int]]]  # its path, whether it is read-only, and the device and inode that it must have
else:
    import _signal as signal  # `signal` would import `enum`, for which every slot would need memory

_CONTROL_FD, _OOM_FD = 3, 4
#: What an init runs until it is ready, and the types whose instances it uses.
_MODULES = (init, priority, private_mounts, privileges, read_only_mounts, spawned_trees, slot_view, system_calls, sys.modules[__name__])
_TYPES = (socket.socket, ctypes.CDLL, struct.Struct, bytes, str, dict, list, init.Init, spawned_trees.SpawnedTrees, type(select.poll()))
_HEADER_BYTES = REQUEST.size
_SET_UP = 0  # The number of the request that sets the template up.


def _receive(sock: socket.socket) -> Tuple[bytes, List[int]]:
    data, ancillary, _, _ = sock.recvmsg(MESSAGE_BYTES, socket.CMSG_SPACE(4 * MAX_DESCRIPTORS), socket.MSG_CMSG_CLOEXEC)
    fds: List[int] = []
    for _, _, packed in ancillary:
        fds += struct.unpack("%di" % (len(packed) // 4), packed[: len(packed) // 4 * 4])
    return data, fds


def _confine_template(request: Mapping[str, Any]) -> int:
    """Give up everything that the template does not need.

    Args:
        request: `parent`: the process id of the agent; `unmounts`: the mounts that only the start of the template has needed; `capabilities`: the mask of the
            capabilities that it needs to set up slots; it keeps those that it has; `joins_networks`: whether it starts slots in networks that exist.

    Returns:
        The descriptor of the network namespace that the template returns to after it has started a slot in another one; -1 if it never does that.

    Raises:
        OSError: the kernel has refused something.
    """
    privileges.make_undumpable()
    privileges.die_with_parent(signal.SIGKILL)
    if os.getppid() != request["parent"]:
        os._exit(1)  # The agent has ended.
    os.dup2(1, 2)  # Errors are reported over the socket from now on, and inits need no open pipe.
    os.umask(0o077)
    os.chdir("/")
    os.setsid()
    system_calls.join_new_session_keyring(needs_new=True)  # No slot gets that of the agent, not even if there is no room for one of its own.
    network_fd = -1
    if request.get("joins_networks"):  # It may not be able to return to the network of the sandbox, so it gets an empty one.
        system_calls.unshare(system_calls.CLONE_NEWNET)
        own = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        network_fd = system_calls.open_network_of(own.fileno())  # The /proc that is mounted here may show other processes.
        own.close()
    capabilities = request["capabilities"] & privileges.permitted_capabilities()
    for path in request["unmounts"]:
        system_calls.unmount(path)
    privileges.empty_bounding_set()
    privileges.set_capabilities(capabilities)
    privileges.forbid_new_privileges()
    return network_fd


def _arrange_descriptors(fds: Sequence[int]) -> None:
    """Move the socket of the agent to `_CONTROL_FD` and the other descriptors behind it, and close all others but the standard streams.

    So what is opened later has a higher number, and an init only replaces the socket by its own.

    Args:
        fds: the socket, and the descriptors of namespaces.
    """
    end = _CONTROL_FD + len(fds)
    copies = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, end) for fd in fds]  # First above all numbers, because one may lie where another one goes.
    for number, fd in enumerate(copies, _CONTROL_FD):
        os.dup2(fd, number, False)
    system_calls.close_from(end)


def _keep_descriptor_of_oom_score(oom_fd: int) -> int:
    """Close all descriptors but the standard streams, the control socket, and that of `oom_score_adj` if there is one. Returns the latter, or -1."""
    if oom_fd < 0:
        system_calls.close_from(_CONTROL_FD + 1)
        return -1
    os.dup2(oom_fd, _OOM_FD, False)
    system_calls.close_from(_OOM_FD + 1)
    return _OOM_FD


class Template:
    """The loop of the template.

    Args:
        sock: the socket of the agent.
        controls: see `slot_view.enter_slot`.
        machine_fd: the descriptor of a mount namespace with the mounts of the machine, in which this process mounts the folders of slots because the agent may
            not do so; -1 if the agent sends detached mounts.
        own_fd: the descriptor of the mount namespace of this process, if there is another one.
        network_fd: see `_confine_template`.
    """

    def __init__(self, sock: socket.socket, controls: Sequence[str], machine_fd: int, own_fd: int, network_fd: int) -> None:
        self._sock = sock
        self._controls = controls
        self._machine_fd = machine_fd
        self._own_fd = own_fd
        self._network_fd = network_fd

    def serve_forever(self) -> NoReturn:
        """Fork an init for each message of the agent, until the agent closes the socket."""
        while True:
            data, fds = _receive(self._sock)
            if not data:
                os._exit(0)  # The agent has ended, or needs the template no longer.
            number, namespaces = REQUEST.unpack_from(data)
            text = b""
            slot_network_fd = fds.pop(1) if self._network_fd >= 0 and loads(data[_HEADER_BYTES:])["joins_network"] else -1
            try:
                if self._machine_fd >= 0:
                    fds[1:1] = self._open_mounts(loads(data[_HEADER_BYTES:])["folders"])
                result = self._fork(namespaces, slot_network_fd)
            except OSError as error:
                result, text = -(error.errno or 1), (error.strerror or str(error)).encode("utf-8", "replace")
            if result == 0:
                self._run_init(data, fds)
            for fd in fds if slot_network_fd < 0 else [*fds, slot_network_fd]:
                os.close(fd)
            self._sock.send(ANSWER.pack(number, result) + text)

    def _fork(self, namespaces: int, slot_network_fd: int) -> int:
        """Fork a process, in the network namespace of a descriptor if that is not -1."""
        if slot_network_fd < 0:
            return system_calls.fork_sibling(namespaces)
        result = -1
        try:
            system_calls.join_namespace(slot_network_fd, system_calls.CLONE_NEWNET)
            result = system_calls.fork_sibling(namespaces)
            return result
        finally:
            if result != 0:
                self._return_to(self._network_fd, system_calls.CLONE_NEWNET)

    def _open_mounts(self, folders: Sequence[Folder]) -> List[int]:
        """Return detached mounts of the folders of a slot, which only the agent can name."""
        system_calls.join_namespace(self._machine_fd, system_calls.CLONE_NEWNS)
        fds: List[int] = []
        try:
            for path, read_only, expected in folders:
                fds.append(detached_mounts.open_detached_mount(path, read_only, expected))
        except OSError:
            for fd in fds:
                os.close(fd)
            raise
        finally:
            self._return_to(self._own_fd, system_calls.CLONE_NEWNS)
        return fds

    def _return_to(self, fd: int, kind: int) -> None:
        try:
            system_calls.join_namespace(fd, kind)
        except OSError:
            os._exit(1)  # No slot may be forked where the machine's mounts or the network of another slot are seen. The agent starts another template.

    def _run_init(self, data: bytes, fds: List[int]) -> NoReturn:
        """Become the init of a slot, in the forked process."""
        os.dup2(fds[0], _CONTROL_FD, False)  # This closes the socket of the template.
        control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, _CONTROL_FD)
        try:
            request = loads(data[_HEADER_BYTES:])
            first_join = len(fds) - request["joins"]
            oom_fd = slot_view.enter_slot(request, fds[1:first_join], fds[first_join:], self._controls)
            init.run_init(control, _keep_descriptor_of_oom_score(oom_fd), is_forked=True)
        except BaseException as error:  # The forked process must never return into the loop of the template, and the agent must learn the reason.
            number = error.errno or 0 if isinstance(error, OSError) else 0
            text = error.strerror or str(error) if isinstance(error, OSError) else "%s: %s" % (type(error).__name__, error)
            control.send(REPORT.pack(FAILED, 0, number, 0, 0) + text.encode("utf-8", "replace"))
        finally:
            os._exit(1)


def main() -> NoReturn:
    """Set the template up as the first message on the socket says, and fork an init for each further message.

    The arguments are the descriptor of the socket and, if there is one, those of the mount namespace of the machine and of its own, see `Template`.
    """
    priority.take_ordinary_priority()
    system_calls.set_process_name(b"slot-template")
    inherited = list(map(int, sys.argv[1:]))
    _arrange_descriptors(inherited)
    machine_fd, own_fd = (_CONTROL_FD + 1, _CONTROL_FD + 2) if len(inherited) > 1 else (-1, -1)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, _CONTROL_FD)
    data, _ = _receive(sock)
    if not data:
        os._exit(0)
    request = loads(data[_HEADER_BYTES:])
    try:
        controls = slot_view.list_read_only_controls()
        network_fd = _confine_template(request)
        template = Template(sock, controls, machine_fd, own_fd, network_fd)
    except OSError as error:
        sock.send(ANSWER.pack(_SET_UP, -(error.errno or 1)) + str(error).encode())
        os._exit(1)
    for program in request["filters"]:
        privileges.prepare_filter(program)
    shared_memory.remember_attributes(_MODULES, _TYPES)
    gc.collect()
    gc.freeze()  # The collector then writes nothing to the memory that all inits share.
    sock.send(ANSWER.pack(_SET_UP, os.getpid()))
    template.serve_forever()
