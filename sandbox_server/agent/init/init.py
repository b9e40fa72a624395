"""Init, the first process of a slot. It starts the processes that the agent requests, reaps them, and reports how they ended.

Init does not trust the processes of the slot. In an isolated slot they can neither kill nor trace it. It exchanges messages with the agent over one SEQPACKET
socket. Requests are marshalled dicts, because both ends run the same interpreter and only the agent can write to the socket. Reports are packed structs (see
`reports`), because the agent must not unmarshal data that could come from a slot. Init imports few modules, because every slot needs memory for them.
"""

from __future__ import annotations

import _socket as socket
import errno
import os
import select
import struct
import sys
import time
from marshal import loads

from sandbox_server.agent.init import privileges, ptrace_detach
from sandbox_server.agent.init.messages import read_large_message, receive_message
from sandbox_server.agent.init.oom_score import SLOT_FLOOR_SCORE, SPAWNED_SCORE
from sandbox_server.agent.init.priority import take_ordinary_priority
from sandbox_server.agent.init.reports import CONFIG_BYTES, EXITED, FAILED, MOVED, READY, REFUSED, REPORT, REQUEST_BYTES, SIGNALLED
from sandbox_server.agent.init.spawned_trees import SpawnedTrees

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from typing import Any, Dict, List, Mapping, NoReturn
else:
    import _signal as signal  # `signal` would import `enum`, for which every slot would need memory

_ERRNO = struct.Struct("i")

# All signals except those whose handling cannot be changed. A shorter list costs more: the C library asks the kernel about each signal that is not in it.
_DEFAULT_SIGNALS = [number for number in range(1, 65) if number not in (9, 19, 32, 33)]
_READ_AND_WRITE, _WRITE = os.O_RDWR | os.O_CLOEXEC, os.O_WRONLY | os.O_CLOEXEC
_CLOCK_BOOTTIME = 7  # The clock of the start times in /proc/PID/stat.
_TICKS = os.sysconf("SC_CLK_TCK")
_OOM_SCORE_OF_SPAWNED, _OOM_SCORE_OF_INIT = b"%d" % SPAWNED_SCORE, b"%d" % SLOT_FLOOR_SCORE
#: The memory of messages and of their buffers counts as memory of the slot. The kernel refuses it while all memory for slots is in use.
_SHORT_OF_MEMORY = (errno.ENOBUFS, errno.ENOMEM)
_MEMORY_RETRY_MS = 5
_STARTS_PROGRAMS = "leftovers_"  # Tools with this prefix start programs. These run entirely as the user of the slot, and with its environment.


def _ignore_signal(number: int, frame: object) -> None:
    """Do nothing: the signal is to wake the loop, for which it needs a handler."""


class Init:
    """The main loop of the first process of a slot.

    Args:
        sock: the control socket of the agent.
        config: the configuration that the agent has sent.
        oom_fd: descriptor of `oom_score_adj` of this process, or -1 if it cannot be written.
    """

    def __init__(self, sock: socket.socket, config: Mapping[str, Any], oom_fd: int) -> None:
        self._sock = sock
        self._config = config
        self._trees = SpawnedTrees(config)
        self._env: Dict[str, str] = config["env"]
        self._null = os.open("/dev/null", _READ_AND_WRITE)
        self._privileged = config["mode"] == "uid"
        self._oom_fd = oom_fd
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._start_error_fds: Dict[int, int] = {}

    def send_report(self, kind: bytes, number: int = 0, status: int = 0, cpu_us: int = 0, rss_kb: int = 0, text: bytes = b"") -> None:
        """Send a report to the agent. If the agent no longer runs, the slot is ended.

        While the kernel has no memory for the report, init tries again: the agent frees memory soon, by ending the slot that uses too much.

        Args:
            kind: one of the kinds in `reports`.
            number: the number of the request or of the process tree.
            status: the status of `wait4`, an errno, or a number of processes, depending on the kind.
            cpu_us: the processor time that was used, in microseconds.
            rss_kb: the largest resident memory, in KiB.
            text: an explanation.
        """
        report = REPORT.pack(kind, number, status, cpu_us, rss_kb) + text
        while True:
            try:
                self._sock.send(report)
            except OSError as error:
                if error.errno not in _SHORT_OF_MEMORY or self._wait_for_end_of_agent(_MEMORY_RETRY_MS):
                    self._end_slot()
            else:
                return

    def _wait_for_end_of_agent(self, timeout_ms: int) -> bool:
        """Wait until the agent has closed its end of the socket. Returns False if it has not done so within `timeout_ms` milliseconds."""
        poll = select.poll()
        poll.register(self._sock.fileno(), 0)  # the kernel always reports that the other end was closed
        return bool(poll.poll(timeout_ms))

    def serve_forever(self) -> NoReturn:
        """Handle requests and reap processes until the agent ends."""
        signal.signal(signal.SIGCHLD, _ignore_signal)
        signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)
        poll = select.poll()
        control = self._sock.fileno()
        poll.register(control, select.POLLIN)
        poll.register(self._wake_r, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == control:
                    self._receive_request()
                else:
                    os.read(self._wake_r, 4096)
                    self._reap_children()

    def _receive_request(self) -> None:
        try:
            data, fds = receive_message(self._sock, REQUEST_BYTES)
        except MemoryError:
            time.sleep(_MEMORY_RETRY_MS / 1000)  # There is no memory for the buffer. The message waits in the socket.
            return
        except ConnectionResetError:
            data = b""  # The agent has closed its end while a report of init was unread.
        if not data:
            self._end_slot()
        try:
            request = loads(data)
            if request["op"] == "large":
                request = read_large_message(fds.pop(0))
            self._handle_request(request, fds)
        finally:
            for fd in fds:
                os.close(fd)

    def _handle_request(self, request: Dict[str, Any], fds: List[int]) -> None:
        op = request["op"]
        if op == "spawn" or op == "fork":
            self._start_process(request, dict(zip(request["fds"], fds)))
        elif op == "signal":
            left = self._trees.signal_tree(request["id"], request["signal"])
            self._reap_children()  # Reap what was killed, so that the report contains its processor time.
            self.send_report(SIGNALLED, request["id"], left, self._trees.used_us(request["id"]))
        elif op == "release":
            self._trees.release_tree(request["id"])
        elif op == "pin":
            os.sched_setaffinity(0, request["processors"])
        elif op == "move":
            os.write(fds[0], b"0")
            self.send_report(MOVED, request["id"])

    def _start_process(self, request: Dict[str, Any], fds: Dict[str, int]) -> None:
        number = request["id"]
        failed_step = b"cgroup"
        try:
            if "cgroup" in fds:
                os.write(fds["cgroup"], b"0")
            if self._oom_fd >= 0:
                # The new process inherits this score: when memory runs out, the kernel kills processes of the slot before init, and init before the agent.
                os.pwrite(self._oom_fd, _OOM_SCORE_OF_SPAWNED, 0)
            started = int(time.clock_gettime(_CLOCK_BOOTTIME) * _TICKS)
            try:
                if request["op"] == "fork" or self._privileged or "tty" in fds:
                    failed_step = b"fork"
                    pid = self._fork_child(request, fds)
                else:
                    failed_step = b"cwd"
                    os.chdir(request["cwd"])
                    failed_step = b"spawn"
                    pid = self._posix_spawn(request, fds)
            finally:
                if self._oom_fd >= 0:
                    os.pwrite(self._oom_fd, _OOM_SCORE_OF_INIT, 0)
        except OSError as error:
            self.send_report(REFUSED, number, error.errno or 0, text=failed_step)
            return
        self._trees.add_tree(number, pid, started, request.get("outlives_calls", False))

    def _environment(self, request: Mapping[str, Any]) -> Dict[str, str]:
        extra = request["env"]
        return dict(self._env, **extra) if extra else self._env

    def _posix_spawn(self, request: Mapping[str, Any], fds: Mapping[str, int]) -> int:
        out = fds["out"]
        actions = [
            (os.POSIX_SPAWN_DUP2, fds.get("in", self._null), 0),
            (os.POSIX_SPAWN_DUP2, out, 1),
            (os.POSIX_SPAWN_DUP2, fds.get("err", out), 2),
        ]
        if "script" in fds:
            actions.append((os.POSIX_SPAWN_DUP2, fds["script"], 3))
        argv = request["argv"]
        return os.posix_spawn(argv[0], argv, self._environment(request), file_actions=actions, setsid=True, setsigmask=(), setsigdef=_DEFAULT_SIGNALS)

    def _fork_child(self, request: Mapping[str, Any], fds: Mapping[str, int]) -> int:
        """Fork a child where `posix_spawn` is not sufficient: to run a tool of the agent, or to change the user.

        The child writes the error of a failed start to a pipe. Init reads the pipe only after the child has ended, because the slot may be able to stop the
        child, and init must never wait for a process of the slot.
        """
        failed_r, failed_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            pid = os.fork()
            if pid == 0:
                try:
                    self._execute_child(request, fds, failed_w)
                except OSError as error:
                    os.write(failed_w, _ERRNO.pack(error.errno or 0))
                finally:
                    os._exit(125)  # A forked child must never return into the loop of init.
        except OSError:
            os.close(failed_r)
            raise
        finally:
            os.close(failed_w)
        self._start_error_fds[pid] = failed_r
        return pid

    def _read_start_errno(self, pid: int) -> int:
        """Return the errno with which an ended child failed to start its program; 0 if it was started, or if the child reports no errors."""
        failed_r = self._start_error_fds.pop(pid, -1)
        if failed_r < 0:
            return 0
        try:
            data = os.read(failed_r, _ERRNO.size)
        except BlockingIOError:
            return 0  # A process that the child has forked still has the other end open.
        finally:
            os.close(failed_r)
        return int(_ERRNO.unpack(data)[0]) if len(data) == _ERRNO.size else 0

    def _execute_child(self, request: Mapping[str, Any], fds: Mapping[str, int], failed_w: int) -> NoReturn:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        self._sock.close()
        if request["op"] == "fork":
            self._run_tool(request, fds, failed_w)
        if "tty" in fds:
            from sandbox_server.agent.init import pseudo_terminal  # before dropping privileges, for the reason given in `_run_tool`
        self._become_slot_user()
        if "tty" in fds:
            fds = pseudo_terminal.open_streams(fds["tty"])
        for source, target in ((fds.get("in", self._null), 0), (fds["out"], 1), (fds.get("err", fds["out"]), 2)):
            os.dup2(source, target)
        os.chdir(request["cwd"])
        if "script" in fds:
            os.dup2(fds["script"], 3)
        os.execve(request["argv"][0], request["argv"], self._environment(request))

    def _become_slot_user(self) -> None:
        """In a child of a privileged init: become the user of the slot. All other restrictions have been inherited."""
        if self._privileged:
            privileges.change_user(self._config["uid"], self._config["gid"])
            privileges.set_capabilities(0)
            privileges.make_undumpable()

    def _run_tool(self, request: Mapping[str, Any], fds: Mapping[str, int], failed_w: int) -> NoReturn:
        # Import the tool before dropping privileges: the user of the slot may not be able to read the files of this interpreter.
        from sandbox_server.agent.inslot import child

        child.import_operation(request["tool"])
        if self._privileged and not request["tool"].startswith(_STARTS_PROGRAMS):
            privileges.assume_effective_uid(self._config["uid"], self._config["helper_uid"])
            privileges.set_capabilities(0)
            privileges.make_undumpable()
        else:
            self._become_slot_user()
        for source, target in ((fds.get("in", self._null), 0), (self._null, 1), (self._null, 2)):
            os.dup2(source, target)
        home = self._config["home"]
        os.chdir(home)
        if request["tool"].startswith(_STARTS_PROGRAMS):
            os.environ.clear()
            os.environ.update(self._env)
        os.close(failed_w)
        child.run_operation(request["tool"], request["args"], {"workspace": home, "roots": self._config["roots"], "home": home}, fds["out"], fds.get("in", -1))
        os._exit(0)

    def _reap_children(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if not ptrace_detach.has_ended(status):
                ptrace_detach.detach_stopped_process(pid, status)
                continue
            start_errno = self._read_start_errno(pid)
            used_us = int((usage.ru_utime + usage.ru_stime) * 1e6)
            number = self._trees.record_reaped(pid, used_us)
            if number is not None and start_errno:
                self.send_report(REFUSED, number, start_errno, text=b"fork")
            elif number is not None:
                self.send_report(EXITED, number, status, used_us, usage.ru_maxrss)

    def _end_slot(self) -> NoReturn:
        self._trees.kill_all()
        os._exit(0)


def _apply_config(config: Mapping[str, Any], is_forked: bool) -> None:
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    # Without a handler, the kernel does not deliver a SIGINT from the slot to the first process of its pid namespace.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    null = os.open("/dev/null", _READ_AND_WRITE)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)
    os.umask(config["umask"])
    mode = config["mode"]
    if config["private_mounts"] is not None:
        from sandbox_server.agent.init import private_mounts

        private_mounts.mount_private_folders(config["private_mounts"], config["uid"])
    if config["read_only"] and mode == "uid":
        from sandbox_server.agent.init import read_only_mounts

        read_only_mounts.mount_read_only(config["home"], config["read_only"])
    if mode != "bwrap":
        privileges.adopt_orphans()
    privileges.set_resource_limits(config["limits"])
    if config["uid"] is not None and not is_forked:
        privileges.empty_bounding_set()
    if mode == "uid":
        # Init keeps its uid, so that the slot can neither signal nor trace it, and the capabilities to become the user of the slot. Its children inherit the
        # other restrictions.
        privileges.set_capabilities(privileges.CAP_SETUID | privileges.CAP_SETGID)
        privileges.confine_process(config["filter"], is_shared=False)
        return
    if config["uid"] is not None:
        privileges.change_user(config["uid"], config["gid"], config["groups"])
    privileges.set_capabilities(0)
    privileges.confine_process(config["filter"], is_shared=mode == "none")
    if mode == "bwrap":
        privileges.die_with_parent(signal.SIGKILL)
    privileges.check_privileges_dropped(config)
    if config["read_only"]:
        from sandbox_server.agent.init import read_only_mounts

        read_only_mounts.check_read_only(config["home"], config["read_only"])  # Only now: with its few capabilities, root cannot search the workspace.


def open_oom_adjustment() -> int:
    """Return a descriptor of `oom_score_adj` of this process, or -1 if it cannot be written."""
    try:
        return os.open("/proc/self/oom_score_adj", _WRITE)
    except OSError:
        return -1  # /proc is read-only: the kernel chooses which process to kill without this score.


def main() -> NoReturn:
    """Be the init of the slot whose control socket is the descriptor that the first argument names."""
    take_ordinary_priority()
    fd = int(sys.argv[1])
    os.set_inheritable(fd, False)
    run_init(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, fd))


def run_init(sock: socket.socket, oom_fd: int = -1, is_forked: bool = False) -> NoReturn:
    """Read the configuration from the control socket, apply it, and serve requests.

    Args:
        sock: the control socket.
        oom_fd: a descriptor of `oom_score_adj` of this process; -1 if it has not been opened.
        is_forked: whether the template has forked this process, which has therefore inherited an empty capability bounding set.
    """
    data, _ = receive_message(sock, CONFIG_BYTES)
    config = loads(data)
    try:
        for joined in config["join"]:
            os.write(joined, b"0")
            os.close(joined)
        if oom_fd < 0:
            # Open it before init becomes undumpable, because afterwards the file belongs to root.
            oom_fd = open_oom_adjustment()
        if oom_fd >= 0:
            os.pwrite(oom_fd, _OOM_SCORE_OF_INIT, 0)
        _apply_config(config, is_forked)
        init = Init(sock, config, oom_fd)
    except OSError as error:
        sock.send(REPORT.pack(FAILED, 0, error.errno or 0, 0, 0) + (error.strerror or str(error)).encode())
        os._exit(1)
    init.send_report(READY)
    init.serve_forever()
