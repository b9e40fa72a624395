"""Starts the template inside the mounts of another process: the program joins its namespaces and then executes the template.

The template must be a child of the agent in the process ids of the agent, so that the inits that it forks are, too. bubblewrap cannot start such a child.
"""

from __future__ import annotations

import os
import sys

from sandbox_server.agent.template import system_calls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


def main() -> NoReturn:
    """Join the mount namespace whose descriptor is the first argument, and execute the program that the further arguments name.

    The second argument is the library path of the program, or empty. This process must be alone with its file system context, as it is after `execve`.
    """
    mounts_fd, library_path, argv = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    system_calls.join_namespace(mounts_fd, system_calls.CLONE_NEWNS)
    os.close(mounts_fd)
    os.execve(argv[0], argv, {"LD_LIBRARY_PATH": library_path} if library_path else {})
