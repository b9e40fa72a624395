"""Init, the first process of a slot: spawns what the agent asks for, reaps, reports. Nothing here trusts the slot, and the slot cannot reach it.

It talks with the agent over one SEQPACKET socket: requests are marshalled dicts (both ends run the same interpreter, and only the agent can write there),
reports are packed structs, because the agent must not unmarshal what could come from a slot. Imports are few: every slot pays for them in memory.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]
import _socket as socket
import marshal
import os
import select
import struct
import sys
import time

from sandbox_server.agent.init import privileges, ptrace_detach
from sandbox_server.agent.init.oom_score import OF_SPAWNED, SLOT_FLOOR
from sandbox_server.agent.init.priority import take_ordinary_priority
from sandbox_server.agent.init.spawned_trees import SpawnedTrees

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List, Mapping, NoReturn, Tuple

REPORT = struct.Struct("<cIiQQ")
READY, FAILED, EXITED, REFUSED, SIGNALLED, MOVED = b"R", b"F", b"X", b"E", b"S", b"M"
MESSAGE_BYTES = 160 << 10
MAX_FDS = 8
_ERRNO = struct.Struct("i")

_DEFAULT_SIGNALS = [number for number in range(1, 65) if number not in (9, 19, 32, 33)]  # all but those nobody can set
_CLOCK_BOOTTIME = 7  # what the start in /proc/PID/stat counts
_TICKS = os.sysconf("SC_CLK_TCK")
_OOM_OF_SPAWNED, _OOM_OF_INIT = b"%d" % OF_SPAWNED, b"%d" % SLOT_FLOOR
_LEAVES_PROCESSES = "leftovers_"  # tools that start programs as the slot would, and so must be the slot's user altogether


def receive(sock: socket.socket) -> Tuple[bytes, List[int]]:
    """One message and the descriptors that came with it."""
    data, ancillary, _, _ = sock.recvmsg(MESSAGE_BYTES, socket.CMSG_LEN(4 * MAX_FDS), socket.MSG_CMSG_CLOEXEC)
    fds: List[int] = []
    for _, _, packed in ancillary:
        fds += struct.unpack("%di" % (len(packed) // 4), packed[: len(packed) // 4 * 4])
    return data, fds


class Init:
    """The loop of a slot's first process."""

    def __init__(self, sock: socket.socket, config: Mapping[str, Any], oom_fd: int) -> None:
        self._sock = sock
        self._config = config
        self._runs = SpawnedTrees(config)
        self._env: Dict[str, str] = config["env"]
        self._null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        self._privileged = config["mode"] == "uid"
        self._oom = oom_fd
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._failures: Dict[int, int] = {}

    def report(self, kind: bytes, number: int = 0, status: int = 0, cpu_us: int = 0, rss_kb: int = 0, text: bytes = b"") -> None:
        """Tell the agent; a dead agent ends the slot."""
        try:
            self._sock.send(REPORT.pack(kind, number, status, cpu_us, rss_kb) + text)
        except OSError:
            self._end()

    def run(self) -> NoReturn:
        """Serve until the agent is gone."""
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)
        poll = select.poll()
        control = self._sock.fileno()
        poll.register(control, select.POLLIN)
        poll.register(self._wake_r, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == control:
                    self._request()
                else:
                    os.read(self._wake_r, 4096)
                    self._reap()

    def _request(self) -> None:
        data, fds = receive(self._sock)
        if not data:
            self._end()
        try:
            request = marshal.loads(data)
            if request["op"] == "large":
                request = _read_large(fds.pop(0))
            self._serve(request, fds)
        finally:
            for fd in fds:
                os.close(fd)

    def _serve(self, request: Dict[str, Any], fds: List[int]) -> None:
        op = request["op"]
        if op == "spawn" or op == "fork":
            self._start(request, dict(zip(request["fds"], fds)))
        elif op == "signal":
            left = self._runs.signal(request["id"], request["signal"])
            self._reap()  # what has been killed is dead, and tells now what it used
            self.report(SIGNALLED, request["id"], left, self._runs.used_us(request["id"]))
        elif op == "release":
            self._runs.release(request["id"])
        elif op == "move":
            os.write(fds[0], b"0")
            self.report(MOVED, request["id"])

    # Starting.

    def _start(self, request: Dict[str, Any], fds: Dict[str, int]) -> None:
        number = request["id"]
        where = b"cgroup"
        try:
            if "cgroup" in fds:
                os.write(fds["cgroup"], b"0")
            if self._oom >= 0:
                # Inherited: out of memory, the kernel takes what the slot runs before it takes init, and init before the agent or the service.
                os.pwrite(self._oom, _OOM_OF_SPAWNED, 0)
            started = int(time.clock_gettime(_CLOCK_BOOTTIME) * _TICKS)
            try:
                if request["op"] == "fork" or self._privileged:
                    where = b"fork"
                    pid = self._fork(request, fds)
                else:
                    where = b"cwd"
                    os.chdir(request["cwd"])
                    where = b"spawn"
                    pid = self._spawn(request, fds)
            finally:
                if self._oom >= 0:
                    os.pwrite(self._oom, _OOM_OF_INIT, 0)
        except OSError as error:
            self.report(REFUSED, number, error.errno or 0, text=where)
            return
        self._runs.began(number, pid, started)

    def _environment(self, request: Mapping[str, Any]) -> Dict[str, str]:
        extra = request["env"]
        return dict(self._env, **extra) if extra else self._env

    def _spawn(self, request: Mapping[str, Any], fds: Mapping[str, int]) -> int:
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

    def _fork(self, request: Mapping[str, Any], fds: Mapping[str, int]) -> int:
        """Fork where `posix_spawn` cannot do it: our own code is to run, or the user is to change.

        A failed start is told through a pipe that is read when the child has ended: the slot may be able to stop it, and init waits for nobody.
        """
        failed_r, failed_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            pid = os.fork()
            if pid == 0:
                try:
                    self._child(request, fds, failed_w)
                except OSError as error:
                    os.write(failed_w, _ERRNO.pack(error.errno or 0))
                finally:
                    os._exit(125)  # whatever happened: a forked child never returns into init's loop
        except OSError:
            os.close(failed_r)
            raise
        finally:
            os.close(failed_w)
        self._failures[pid] = failed_r
        return pid

    def _failure(self, pid: int) -> int:
        """The errno with which a child that has ended could not start what it was to; 0: it could, or was never to say."""
        failed_r = self._failures.pop(pid, -1)
        if failed_r < 0:
            return 0
        try:
            said = os.read(failed_r, _ERRNO.size)
        except BlockingIOError:
            return 0  # something it forked has the other end
        finally:
            os.close(failed_r)
        return int(_ERRNO.unpack(said)[0]) if len(said) == _ERRNO.size else 0

    def _child(self, request: Mapping[str, Any], fds: Mapping[str, int], failed_w: int) -> NoReturn:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        self._sock.close()
        if request["op"] == "fork":
            self._tool(request, fds, failed_w)
        self._drop()
        out, err, script = fds["out"], fds.get("err", fds["out"]), fds.get("script")
        for source, target in ((fds.get("in", self._null), 0), (out, 1), (err, 2)):
            os.dup2(source, target)
        os.chdir(request["cwd"])
        if script is not None:
            os.dup2(script, 3)
        os.execve(request["argv"][0], request["argv"], self._environment(request))

    def _drop(self) -> None:
        """In a fork of a privileged init: become the slot's user. All else of what confines it is inherited."""
        if self._privileged:
            privileges.become(self._config["uid"], self._config["gid"])
            privileges.set_capabilities(0)
            privileges.hide()

    def _tool(self, request: Mapping[str, Any], fds: Mapping[str, int], failed_w: int) -> NoReturn:
        # Imported before the drop: the slot's user may not be allowed to read where this interpreter lives.
        from sandbox_server.agent.inslot import child

        child.import_operation(request["tool"])
        if self._privileged and not request["tool"].startswith(_LEAVES_PROCESSES):
            privileges.act_as(self._config["uid"], self._config["keeper"])
            privileges.set_capabilities(0)
            privileges.hide()
        else:
            self._drop()
        for source, target in ((fds.get("in", self._null), 0), (self._null, 1), (self._null, 2)):
            os.dup2(source, target)
        home = self._config["home"]
        os.chdir(home)
        os.environ.clear()
        os.environ.update(self._env)
        os.close(failed_w)
        child.run_operation(request["tool"], request["args"], {"workspace": home, "roots": self._config["roots"], "home": home}, fds["out"], fds.get("in", -1))
        os._exit(0)

    # Reaping.

    def _reap(self) -> None:
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
            failed = self._failure(pid)
            used_us = int((usage.ru_utime + usage.ru_stime) * 1e6)
            number = self._runs.ended(pid, used_us)
            if number is not None and failed:
                self.report(REFUSED, number, failed, text=b"fork")
            elif number is not None:
                self.report(EXITED, number, status, used_us, usage.ru_maxrss)

    def _end(self) -> NoReturn:
        self._runs.end_all()
        os._exit(0)


def _read_large(fd: int) -> Dict[str, Any]:
    try:
        size = os.fstat(fd).st_size
        data = b""
        while len(data) < size:
            data += os.pread(fd, size - len(data), len(data))
        request: Dict[str, Any] = marshal.loads(data)
        return request
    finally:
        os.close(fd)


def _prepare(config: Mapping[str, Any]) -> None:
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    # No handler: the kernel then keeps a slot's SIGINT from the first process of its namespace.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)
    os.umask(config["umask"])
    if config["affinity"]:
        os.sched_setaffinity(0, config["affinity"])
    mode = config["mode"]
    if config["places"] is not None:
        from sandbox_server.agent.init import private_mounts

        private_mounts.make_own(config["places"], config["uid"])
    if mode != "bwrap":
        privileges.adopt_orphans()
    privileges.set_limits(config["limits"])
    if config["uid"] is not None:
        privileges.empty_bounding_set()
    if mode == "uid":
        # Init keeps its uid, so that the slot can neither signal nor trace it, and the right to become the slot's user. All else its forks inherit.
        privileges.set_capabilities(privileges.CAP_SETUID | privileges.CAP_SETGID)
        privileges.confine(config["filter"])
        return
    if config["uid"] is not None:
        privileges.become(config["uid"], config["gid"], config["groups"])
    privileges.set_capabilities(0)
    privileges.confine(config["filter"])
    if mode == "bwrap":
        privileges.die_with_parent(signal.SIGKILL)
    privileges.check_powerless(config)


def _open_oom_adjustment() -> int:
    try:
        return os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return -1  # a read-only /proc: the kernel chooses without advice


def main() -> NoReturn:
    """Take the control socket named in argv, become what the agent's first message says, serve."""
    take_ordinary_priority()
    fd = int(sys.argv[1])
    os.set_inheritable(fd, False)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, fd)
    data, _ = receive(sock)
    config = marshal.loads(data)
    try:
        for joined in config["join"]:
            os.write(joined, b"0")
            os.close(joined)
        # Before init hides itself: afterwards the file is root's.
        oom_fd = _open_oom_adjustment()
        if oom_fd >= 0:
            os.pwrite(oom_fd, _OOM_OF_INIT, 0)
        _prepare(config)
        init = Init(sock, config, oom_fd)
    except OSError as error:
        sock.send(REPORT.pack(FAILED, 0, error.errno or 0, 0, 0) + (error.strerror or str(error)).encode())
        os._exit(1)
    init.report(READY)
    init.run()
