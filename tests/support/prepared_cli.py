"""`sandbox` without its imports: a process that has imported the command line forks a child for each command.

A start of `sandbox` costs half a second of processor time, nearly all of it for imports, and the suite starts it hundreds of times.
The child has the arguments, the environment, the folder and the standard streams of the command, as a new process would have them. What depends
on the very start of the process, such as signals during the imports or a terminal of its own, is tested on a real process.
"""

from __future__ import annotations

import array
import functools
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

PROGRAM = (sys.executable, "-m", "tests.support.prepared_cli")
ROOT = Path(__file__).parents[2]
MAX_REQUEST_BYTES = 1 << 18
# The command line, and what its libraries import when they are first used.
PRELOADED = ("env_client.cli.app", "anyio", "certifi", "encodings.idna", "h11", "httpcore", "pydantic.type_adapter", "stringprep", "zoneinfo")


class PreparedCli:
    """The prepared process, and how to run commands in its children. Threads may run commands at the same time."""

    def __init__(self) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self._requests, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MAX_REQUEST_BYTES)
        command = [*PROGRAM, str(theirs.fileno())]
        # It ends when this process has ended and the connection is closed.
        self._process = subprocess.Popen(command, cwd=ROOT, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        theirs.close()

    def run(self, words: tuple[str, ...], environ: Mapping[str, str], cwd: Path, stdin: bytes | None, timeout_s: float) -> subprocess.CompletedProcess[bytes]:
        """Run one command to its end.

        Args:
            words: its arguments.
            environ: all of its environment variables.
            cwd: the folder that it runs in.
            stdin: what it reads from standard input; None: nothing.
            timeout_s: how long it may take, in seconds.

        Raises:
            TimeoutError: it took longer. It is left running.
        """
        ours, theirs = socket.socketpair()
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, ours:
            given.write(stdin or b"")
            given.seek(0)
            request = {"words": words, "environ": dict(environ), "cwd": str(cwd)}
            streams = [given.fileno(), out.fileno(), err.fileno(), theirs.fileno()]
            with theirs:
                self._requests.sendmsg([json.dumps(request).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", streams))])
            ours.settimeout(timeout_s)
            status = int(ours.recv(16))
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess(["sandbox", *words], status, out.read(), err.read())

    def end(self) -> None:
        """End the prepared process."""
        self._requests.close()
        self._process.wait()


@functools.cache
def prepared_cli() -> PreparedCli:
    """Return the prepared process of this test process, which is started at the first use."""
    return PreparedCli()


def _serve(requests: socket.socket) -> None:
    """Fork a child for each request. A child in between waits for the command and reports its exit status."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children in between
    while True:
        data, descriptors, _, _ = socket.recv_fds(requests, MAX_REQUEST_BYTES, 4)
        if not data:
            return
        if os.fork() == 0:
            requests.close()
            _run_and_report(json.loads(data), descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _run_and_report(request: Mapping[str, Any], descriptors: list[int]) -> None:
    """Returns in the process that is to run the command, and nowhere else."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid != 0:
        _, status = os.waitpid(pid, 0)
        os.write(descriptors[3], str(os.waitstatus_to_exitcode(status)).encode())
        os._exit(0)
    for number, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, number)
    os.closerange(3, max(descriptors) + 1)
    os.environ.clear()
    os.environ.update(request["environ"])
    os.chdir(request["cwd"])
    _run_command(request["words"])


def _run_command(words: list[str]) -> NoReturn:
    from env_client.cli import main

    sys.argv = ["sandbox", *words]
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
    main()
    raise AssertionError("main ends the process")


if __name__ == "__main__":
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()  # the children share what was imported, as long as nobody touches it
    _serve(socket.socket(fileno=int(sys.argv[1])))
