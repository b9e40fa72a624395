"""The template of slots: a process that forks their inits, so that none of them has to start an interpreter and to mount the file systems of the machine.

The agent starts the template as a new program, whose memory has never held anything of the agent. The template has one thread, and its socket is its only
connection. It reads messages of the agent alone: it runs nothing, opens nothing that a slot has chosen, and leaves everything that concerns one slot to the
process that it forks. The parent of this process is the agent, which so learns how it ends, and the process outlives the template.
"""

from __future__ import annotations

import _socket as socket
import gc
import marshal
import os
import struct
import sys

from sandbox_server.agent.init import init, privileges
from sandbox_server.agent.init.priority import take_ordinary_priority
from sandbox_server.agent.init.reports import FAILED, REPORT
from sandbox_server.agent.template import slot_view, system_calls
from sandbox_server.agent.template.messages import ANSWER, MAX_DESCRIPTORS, MESSAGE_BYTES, REQUEST

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from typing import Any, List, Mapping, NoReturn, Sequence, Tuple
else:
    import _signal as signal  # `signal` would import `enum`, for which every slot would need memory

_CONTROL_FD = 3
_SET_UP = 0  # The number of the request that sets the template up.


def _receive(sock: socket.socket) -> Tuple[bytes, List[int]]:
    data, ancillary, _, _ = sock.recvmsg(MESSAGE_BYTES, socket.CMSG_SPACE(4 * MAX_DESCRIPTORS), socket.MSG_CMSG_CLOEXEC)
    fds: List[int] = []
    for _, _, packed in ancillary:
        fds += struct.unpack("%di" % (len(packed) // 4), packed[: len(packed) // 4 * 4])
    return data, fds


def _import_what_inits_need() -> None:
    """Import now what an init would import later, so that all inits share its memory."""
    import resource  # noqa: F401

    from sandbox_server.agent.init import private_mounts, read_only_mounts  # noqa: F401


def _confine_template(request: Mapping[str, Any]) -> None:
    """Give up everything that the template does not need.

    Args:
        request: `parent`: the process id of the agent; `unmounts`: the mounts that only the start of the template has needed; `capabilities`: the mask of the
            capabilities that it needs to set up slots; it keeps those that it has.

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
    capabilities = request["capabilities"] & privileges.permitted_capabilities()
    for path in request["unmounts"]:
        system_calls.unmount(path)
    privileges.empty_bounding_set()
    privileges.set_capabilities(capabilities)
    privileges.forbid_new_privileges()


def _run_init(template_socket: socket.socket, data: bytes, fds: List[int], controls: Sequence[str]) -> NoReturn:
    """Become the init of a slot, in the forked process."""
    control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, fds[0])
    try:
        template_socket.close()
        request = marshal.loads(data[REQUEST.size :])
        first_join = len(fds) - request["joins"]
        slot_view.enter_slot(request, fds[1:first_join], fds[first_join:], controls)
        control.detach()
        if fds[0] != _CONTROL_FD:
            os.dup2(fds[0], _CONTROL_FD, False)
        control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, _CONTROL_FD)
        system_calls.close_from(_CONTROL_FD + 1)
        init.run_init(control)
    except BaseException as error:  # The forked process must never return into the loop of the template, and the agent must learn the reason.
        control.send(REPORT.pack(FAILED, 0, getattr(error, "errno", None) or 0, 0, 0) + (str(error) or type(error).__name__).encode("utf-8", "replace"))
    finally:
        os._exit(1)


def _serve_forever(sock: socket.socket, controls: Sequence[str]) -> NoReturn:
    while True:
        data, fds = _receive(sock)
        if not data:
            os._exit(0)  # The agent has ended, or needs the template no longer.
        number, namespaces = REQUEST.unpack_from(data)
        text = b""
        try:
            result = system_calls.fork_sibling(namespaces)
        except OSError as error:
            result, text = -(error.errno or 1), str(error).encode()
        if result == 0:
            _run_init(sock, data, fds, controls)
        for fd in fds:
            os.close(fd)
        sock.send(ANSWER.pack(number, result) + text)


def main() -> NoReturn:
    """Set the template up as the first message on the socket says, whose descriptor is the first argument, and fork an init for each further message."""
    take_ordinary_priority()
    system_calls.set_process_name(b"slot-template")
    fd = int(sys.argv[1])
    os.set_inheritable(fd, False)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, fd)
    data, _ = _receive(sock)
    if not data:
        os._exit(0)
    _import_what_inits_need()
    controls = slot_view.list_read_only_controls()
    try:
        _confine_template(marshal.loads(data[REQUEST.size :]))
    except OSError as error:
        sock.send(ANSWER.pack(_SET_UP, -(error.errno or 1)) + str(error).encode())
        os._exit(1)
    gc.collect()
    gc.freeze()  # The collector then writes nothing to the memory that all inits share.
    sock.send(ANSWER.pack(_SET_UP, os.getpid()))
    _serve_forever(sock, controls)
