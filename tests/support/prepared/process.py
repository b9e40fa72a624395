"""Programs without their imports: a process that has imported a program forks a child for each start of it.

A start of `sandbox` or of the service costs half a second to a second of processor time, nearly all of it for imports, and the suite starts them hundreds
of times. The child has the arguments, the environment, the folder and the standard streams of the program, as a new process would have them, and a terminal
of its own where the program has one. It ends without the deletion of its modules. What depends on the very start or end of the process is tested on a real
process: signals during the imports, and how the interpreter writes what is left for streams that nobody reads.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import resource
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

ROOT = Path(__file__).parents[3]
#: A program that has the prepared process run the command. It needs a twentieth of the processor time of most programs' imports.
SCRIPT = """#!{python} -IS
import array, json, os, signal, socket, sys
requests = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
requests.connect("{address}")
ours, theirs = socket.socketpair()
words, streams = sys.argv[1:], [0, 1, 2]
if "--ready-fd" in words:
    place = words.index("--ready-fd") + 1
    streams.append(int(words[place]))
    words[place] = "3"
request = {{"words": words, "environ": dict(os.environ), "cwd": os.getcwd(), "has_terminal": False}}
requests.sendmsg([json.dumps(request).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [*streams, theirs.fileno()]))])
for each in (requests, theirs):
    each.close()
for descriptor in streams:
    os.close(descriptor)
reports = ours.makefile()
pid = int(reports.readline())
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda number, _: os.kill(pid, number))
status = int(reports.readline())
os._exit(status if status >= 0 else 128 - status)
"""
MAX_REQUEST_BYTES = 1 << 18
MAX_DESCRIPTORS = 8


class PreparedCommand:
    """A command that runs in a child of the prepared process. It has those methods of `subprocess.Popen` that the tests need.

    Args:
        connection: the connection on which the prepared process reports the process id and the exit status.
        args: the command, for messages.
        stdout: the reading end of its standard output, if that is a pipe.
        stderr: the reading end of its standard error, if that is a pipe.
    """

    def __init__(self, connection: socket.socket, args: Sequence[str], stdout: IO[bytes] | None, stderr: IO[bytes] | None) -> None:
        self._connection = connection
        self._reports = connection.makefile("rb", buffering=0)
        self.args, self.stdout, self.stderr = args, stdout, stderr
        self.returncode: int | None = None
        self.pid = int(self._reports.readline())

    def __enter__(self) -> PreparedCommand:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        self._close_connection()  # the prepared process now kills the command if it still runs

    def fileno(self) -> int:
        """Return the descriptor that can be read once the command has ended, for event loops."""
        return self._connection.fileno()

    def poll(self) -> int | None:
        """Return the exit status; None while the command runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the command; return its exit status.

        Raises:
            subprocess.TimeoutExpired: it has not ended within `timeout` seconds.
        """
        if self.returncode is None:
            if not _wait_until_readable([self._connection], timeout):
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self.returncode = int(self._reports.readline())
            self._close_connection()
        return self.returncode

    def communicate(self, timeout: float) -> tuple[bytes, bytes]:
        """Read standard output and standard error to their ends, and wait for the end of the command.

        Raises:
            subprocess.TimeoutExpired: nothing more was written for `timeout` seconds, and the command has not ended.
        """
        assert self.stdout is not None
        assert self.stderr is not None
        written = {self.stdout: b"", self.stderr: b""}
        is_open = dict.fromkeys(written, True)
        while any(is_open.values()):
            readable = _wait_until_readable([stream for stream in written if is_open[stream]], timeout)
            if not readable:
                raise subprocess.TimeoutExpired(self.args, timeout, written[self.stdout], written[self.stderr])
            for stream in readable:
                chunk = os.read(stream.fileno(), 65536)
                written[stream] += chunk
                is_open[stream] = bool(chunk)
        self.wait(timeout)
        return written[self.stdout], written[self.stderr]

    def send_signal(self, number: signal.Signals) -> None:
        """Send the command a signal if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)  # while the connection is open, no other process has this process id

    def _close_connection(self) -> None:
        self._reports.close()
        self._connection.close()

    def kill(self) -> None:
        """Send the command SIGKILL if it still runs."""
        self.send_signal(signal.SIGKILL)


class PreparedProcess:
    """A prepared process, and how to run commands in its children. Threads may run commands at the same time.

    Args:
        module: the module of the program: run as a script, it calls `serve_requests`.
        arguments: further arguments of that script.
    """

    def __init__(self, module: str, *arguments: str) -> None:
        self._module = module
        #: A folder for programs, which no other user can enter. The prepared process removes it at its end.
        self.folder = Path(tempfile.mkdtemp(prefix="sp-prepared-", dir="/tmp"))
        self._address = str(self.folder / "requests")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(self._address)
        listener.listen(16)
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self._requests, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MAX_REQUEST_BYTES)
        command = [sys.executable, "-m", module, str(theirs.fileno()), str(listener.fileno()), *arguments]
        # It ends when this process has ended and the connection is closed.
        self._process = subprocess.Popen(command, cwd=ROOT, pass_fds=[theirs.fileno(), listener.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        theirs.close()
        listener.close()

    def run(self, words: Sequence[str], environ: Mapping[str, str], cwd: Path, stdin: bytes | None, timeout_s: float) -> subprocess.CompletedProcess[bytes]:
        """Run one command to its end.

        Args:
            words: its arguments.
            environ: all of its environment variables.
            cwd: the folder that it runs in.
            stdin: what it reads from standard input; None: nothing.
            timeout_s: how long it may take, in seconds.

        Raises:
            subprocess.TimeoutExpired: it took longer, and was killed.
        """
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            given.write(stdin or b"")
            given.seek(0)
            with self.start(words, environ, cwd, (given.fileno(), out.fileno(), err.fileno())) as running:
                status = running.wait(timeout_s)
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess([self._module, *words], status, out.read(), err.read())

    def start(
        self, words: Sequence[str], environ: Mapping[str, str], cwd: Path, streams: Sequence[int | None], *, has_terminal: bool = False
    ) -> PreparedCommand:
        """Start one command. It is killed if it still runs when the context of the returned command ends.

        Args:
            words: its arguments.
            environ: all of its environment variables.
            cwd: the folder that it runs in.
            streams: its descriptors from 0 on: standard input, output, error, and any others; None, for output and error: a pipe that the test reads.
            has_terminal: whether standard input is a terminal that becomes the controlling terminal of the command, in a session of its own.
        """
        with contextlib.ExitStack() as theirs:
            pipes = [os.pipe() if given is None else None for given in streams]
            for pipe in pipes:
                if pipe is not None:
                    theirs.callback(os.close, pipe[1])
            ours, connection = socket.socketpair()
            theirs.enter_context(connection)
            request = {"words": list(words), "environ": dict(environ), "cwd": str(cwd), "has_terminal": has_terminal}
            descriptors = [pipe[1] if pipe is not None else given for pipe, given in zip(pipes, streams, strict=True)]
            rights = array.array("i", [*descriptors, connection.fileno()])
            self._requests.sendmsg([json.dumps(request).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        _, stdout, stderr = (open(pipe[0], "rb", buffering=0) if pipe is not None else None for pipe in pipes[:3])  # noqa: SIM115 - the command closes them
        return PreparedCommand(ours, [self._module, *words], stdout, stderr)

    def has_limits_of_this_process(self) -> bool:
        """Return whether its children have the control groups, the processors and the limit of open files that children of this process have."""
        pid = self._process.pid
        groups = {Path(f"/proc/{each}/cgroup").read_text(encoding="utf-8") for each in (pid, os.getpid())}
        files = {resource.prlimit(each, resource.RLIMIT_NOFILE) for each in (pid, os.getpid())}
        return len(groups) == len(files) == 1 and os.sched_getaffinity(pid) == os.sched_getaffinity(0)

    def install(self, path: Path) -> None:
        """Write a program that has this prepared process run the command, for shells and for programs that start it.

        If the program itself is killed with SIGKILL, the command is killed a moment later, so what must have ended with the program is not run this way.

        Args:
            path: where the program is written.
        """
        path.write_text(SCRIPT.format(python=sys.executable, address=self._address), encoding="utf-8")
        path.chmod(0o755)


def _wait_until_readable(files: Sequence[Any], timeout_s: float | None) -> list[Any]:
    """Return those of some files that can be read, as soon as there is one; none if that takes too long."""
    with selectors.DefaultSelector() as selector:
        for file in files:
            selector.register(file, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(timeout_s)]


def serve_requests(preloaded: Sequence[str], run: Callable[[list[str]], NoReturn]) -> None:
    """Import the program, then fork a child for each request. Returns when the test process has ended.

    Requests come from the connection whose descriptor is the first argument, and one over each connection to the listener whose descriptor is the second.

    Args:
        preloaded: the modules to import.
        run: runs the program with some arguments, and ends the process.
    """
    for name in preloaded:
        importlib.import_module(name)
    gc.freeze()  # the children share what was imported, as long as nobody touches it
    requests, listener = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children in between
    while True:
        (ready, *_) = _wait_until_readable([requests, listener], None)
        connection = requests if ready is requests else listener.accept()[0]
        data, descriptors, _, _ = socket.recv_fds(connection, MAX_REQUEST_BYTES, MAX_DESCRIPTORS)
        if connection is not requests:
            connection.close()
        elif not data:
            shutil.rmtree(Path(listener.getsockname()).parent)
            return
        if data and os.fork() == 0:
            requests.close()
            listener.close()
            _run_and_report(json.loads(data), descriptors, run)
        for descriptor in descriptors:
            os.close(descriptor)


def _run_and_report(request: Mapping[str, Any], descriptors: list[int], run: Callable[[list[str]], NoReturn]) -> NoReturn:
    """In a child in between: start the program in a child of its own, and report its process id and its exit status."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    *streams, connection = descriptors
    pid = os.fork()
    if pid != 0:
        for descriptor in streams:
            os.close(descriptor)
        _report(pid, socket.socket(fileno=connection))
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
    os.closerange(len(streams), max(descriptors) + 1)
    if request["has_terminal"]:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    os.environ.clear()
    os.environ.update(request["environ"])
    os.chdir(request["cwd"])
    tempfile.tempdir = None  # TMPDIR may be another folder than when the modules were imported
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
    try:
        run(request["words"])
    except SystemExit as end:
        _end_process(end.code)
        raise


def _end_process(code: object) -> None:
    """Do what an interpreter does at its end, but for the deletion of all modules, which takes half as long as a command of `sandbox`.

    Returns only if the exit status is not a number, or if what is left cannot be written: the interpreter itself reports that.
    """
    if code is not None and not isinstance(code, int):
        return
    threading._shutdown()  # type: ignore[attr-defined]  # only the interpreter calls it, to wait for the threads that are no daemons
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit((code or 0) & 0xFF)


def _report(pid: int, connection: socket.socket) -> NoReturn:
    """Report the process id of a command, and its exit status when it ends; kill it if nobody waits for that any more."""
    with contextlib.suppress(OSError):
        connection.sendall(b"%d\n" % pid)
        ended = os.pidfd_open(pid)
        if ended not in _wait_until_readable([ended, connection], None):
            os.kill(pid, signal.SIGKILL)
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert found is not None
        connection.sendall(b"%d\n" % (found.si_status if found.si_code == os.CLD_EXITED else -found.si_status))
        connection.recv(1)  # the process id stays that of the command until nobody can send it signals any more
    os._exit(0)
