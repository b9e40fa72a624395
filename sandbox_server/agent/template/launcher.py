"""Starts the template inside the mounts of another process: the program joins its namespaces and then executes the template.

The template must be a child of the agent in the process ids of the agent, so that the inits that it forks are, too. bubblewrap cannot start such a child.
"""

from __future__ import annotations

import os
import sys

from sandbox_server.agent.template import system_calls
from sandbox_server.agent.template.messages import ENVIRONMENT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


def main() -> NoReturn:
    """Join the namespaces and execute the program. This process must be alone with its file system context, as it is after `execve`.

    The arguments are the descriptor of the mount namespace, that of the user namespace that owns it, or -1 if this process needs none, the library path of the
    program, or an empty text, and the program with its arguments. With a user namespace, the program gets two further arguments: the descriptor of a mount
    namespace with the mounts of the machine, in which the program can mount the folders of slots, and that of the one that it is in.
    """
    mounts_fd, users_fd, library_path, argv = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:]
    if users_fd >= 0:
        system_calls.join_namespace(users_fd, system_calls.CLONE_NEWUSER)
        os.close(users_fd)
        system_calls.unshare(system_calls.CLONE_NEWNS)
        machine_fd = os.open("/proc/self/ns/mnt", os.O_RDONLY)
        os.set_inheritable(machine_fd, True)
        argv += [str(machine_fd), str(mounts_fd)]
    system_calls.join_namespace(mounts_fd, system_calls.CLONE_NEWNS)
    if users_fd < 0:
        os.close(mounts_fd)
    os.execve(argv[0], argv, {**ENVIRONMENT, **({"LD_LIBRARY_PATH": library_path} if library_path else {})})
