"""Leftovers of every kind, planted in a slot as a rollout could, and looked for: how a reset is put to the test. Both run inside, with the slot's rights.

Everything carries one name that nothing else has, so that what is found is what was planted.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import resource
import signal
import socket
import zlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, List, Mapping, NoReturn

    from sandbox_server.agent.inslot.reply import Reply

    Kinds = Dict[str, str]

DEPTH = 1000
OPEN_FILES = 61  # a limit nobody else has
NICE = 7
_WAIT = "while :; do sleep 3600; done"
_IPC_CREAT = 0o1000
_SHM_BYTES = 4096
_SYSV = ("shm", "sem", "msg")
_CRON = ("/var/spool/cron/crontabs", "/var/spool/cron", "/var/spool/at", "/var/spool/cron/atjobs", "/etc/cron.d")
_libc = ctypes.CDLL(None, use_errno=True)


def paths(name: str, home: str) -> Dict[str, str]:
    """Where the files are planted, by kind."""
    return {
        "file": os.path.join(home, name),
        "hidden_file": os.path.join(home, "." + name),
        "fifo": os.path.join(home, name + "-fifo"),
        "symlink": os.path.join(home, name + "-link"),
        "closed_folder": os.path.join(home, name + "-closed"),
        "deep_tree": os.path.join(home, name + "-deep"),
        "login_file": os.path.join(home, ".profile"),
        "shell_file": os.path.join(home, ".bashrc"),
        "systemd_unit": os.path.join(home, ".config/systemd/user", name + ".service"),
        "tmp_file": "/tmp/" + name,
        "var_tmp_file": "/var/tmp/" + name + "-var",
        "shm_file": "/dev/shm/" + name,
        "posix_shm": "/dev/shm/sem." + name,
    }


def sysv_key(name: str, kind: str) -> int:
    """The key of a System V object."""
    return zlib.crc32(("%s-%s" % (name, kind)).encode()) & 0x7FFFFFFF or 1


# Planting.


def leftovers_plant(args: Mapping[str, Any], ctx: Mapping[str, Any], reply: Reply) -> None:
    """Plant what this slot lets itself be left; the answer says what that was, and what could not be planted and why."""
    name = args["name"]
    planted: List[Dict[str, str]] = []
    refused: List[Dict[str, str]] = []
    sockets: List[int] = []

    def attempt(kind: str, work: Callable[[], str]) -> None:
        try:
            planted.append({"kind": kind, "detail": work()})
        except OSError as error:
            refused.append({"kind": kind, "detail": error.strerror or str(error)})

    for kind, path in paths(name, ctx["home"]).items():
        attempt(kind, lambda kind=kind, path=path: _plant_path(kind, path))  # type: ignore[misc]
    attempt("cron_file", lambda: _plant_cron(name))
    attempt("tcp_socket", lambda: _listen_tcp(sockets))
    attempt("abstract_socket", lambda: _listen_abstract(name))
    attempt("lock", lambda: _lock(name))
    for kind in _SYSV:
        attempt("sysv_" + kind, lambda kind=kind: _make_sysv(name, kind))  # type: ignore[misc]
    attempt("mqueue", lambda: _make_queue(name))
    for kind, start in (("process", _be_plain), ("detached_process", _be_detached), ("deaf_process", _be_deaf), ("environment", _be_changed)):
        attempt(kind, lambda kind=kind, start=start: _fork("%s-%s" % (name, kind), args["shell"], start))  # type: ignore[misc]
    nice, processors = os.getpriority(os.PRIO_PROCESS, os.getppid()), len(os.sched_getaffinity(os.getppid()))
    attempt("priority", _renice_init)
    attempt("affinity", _pin_init)
    reply.ok(planted=planted, refused=refused, inode=sockets[0] if sockets else 0, nice=nice, processors=processors)


def _plant_path(kind: str, path: str) -> str:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "symlink":
        os.symlink("/etc/passwd", path)
    elif kind == "closed_folder":
        os.mkdir(path)
        _write(os.path.join(path, "inside"))
        os.chmod(path, 0)
    elif kind == "deep_tree":
        _dig(path)
    else:
        _write(path)
    return path


def _write(path: str) -> None:
    with open(path, "wb") as file:  # no encoding: this slot may not be able to read where codecs lie
        file.write(b"left behind\n")


def _dig(path: str) -> None:
    fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for step in [path, *["d"] * DEPTH]:
            os.mkdir(step)
            os.chdir(step)
        _write("bottom")
    finally:
        os.fchdir(fd)
        os.close(fd)


def _plant_cron(name: str) -> str:
    reasons = []
    for folder in _CRON:
        path = os.path.join(folder, name)
        try:
            _write(path)
        except OSError as error:
            reasons.append("%s: %s" % (folder, error.strerror))
            continue
        return path
    raise OSError(errno.EACCES, ", ".join(reasons))


def _listen_tcp(inodes: List[int]) -> str:
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.bind(("127.0.0.1", 0))
    sock.listen(1)
    inodes.append(os.fstat(sock.fileno()).st_ino)
    port = sock.getsockname()[1]
    _pass_on(sock.detach())
    return "127.0.0.1:%d" % port


def _listen_abstract(name: str) -> str:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind("\0" + name)
    sock.listen(1)
    _pass_on(sock.detach())
    return "@" + name


def _lock(name: str) -> str:
    path = "/tmp/%s-lock" % name
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    _pass_on(fd)
    return path


def _pass_on(fd: int) -> None:
    """Let the processes that are planted afterwards hold it."""
    os.set_inheritable(fd, True)


def _called(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def _make_sysv(name: str, kind: str) -> str:
    key = sysv_key(name, kind)
    if kind == "shm":
        _called(_libc.shmget(key, ctypes.c_size_t(_SHM_BYTES), _IPC_CREAT | 0o600))
    elif kind == "sem":
        _called(_libc.semget(key, 1, _IPC_CREAT | 0o600))
    else:
        _called(_libc.msgget(key, _IPC_CREAT | 0o600))
    return "key %d" % key


def _has_sysv(name: str, kind: str) -> bool:
    key = sysv_key(name, kind)
    if kind == "shm":
        return int(_libc.shmget(key, ctypes.c_size_t(0), 0)) >= 0
    if kind == "sem":
        return int(_libc.semget(key, 0, 0)) >= 0
    return int(_libc.msgget(key, 0)) >= 0


def _open_queue(name: str, flags: int) -> int:
    try:
        library = _libc if hasattr(_libc, "mq_open") else ctypes.CDLL("librt.so.1", use_errno=True)
        return _called(library.mq_open(b"/" + name.encode(), flags, 0o600, None))
    except AttributeError:
        raise OSError(errno.ENOSYS, "there is no mq_open here") from None


def _make_queue(name: str) -> str:
    os.close(_open_queue(name, os.O_RDWR | os.O_CREAT))
    return "/" + name


def _has_queue(name: str) -> bool:
    try:
        os.close(_open_queue(name, os.O_RDONLY))
    except OSError:
        return False
    return True


# Processes.


def _fork(marker: str, shell: str, be: Callable[[str], Dict[str, str]]) -> str:
    pid = os.fork()
    if pid == 0:
        _become_leftover(marker, shell, be)
    return "pid %d" % pid


def _become_leftover(marker: str, shell: str, be: Callable[[str], Dict[str, str]]) -> NoReturn:
    try:
        environment = be(marker)
        os.execve(shell, [shell, "-c", _WAIT, marker], environment)
    finally:
        os._exit(1)


def _be_plain(marker: str) -> Dict[str, str]:
    return dict(os.environ)


def _be_detached(marker: str) -> Dict[str, str]:
    os.setsid()
    if os.fork():
        os._exit(0)
    return dict(os.environ)


def _be_deaf(marker: str) -> Dict[str, str]:
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    return _be_detached(marker)


def _be_changed(marker: str) -> Dict[str, str]:
    os.umask(0)
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))
    return dict(_be_detached(marker), SANDBOX_LEFT=marker)


def _renice_init() -> str:
    os.setpriority(os.PRIO_PROCESS, os.getppid(), NICE)
    return "init has the nice value %d" % NICE


def _pin_init() -> str:
    processors = os.sched_getaffinity(os.getppid())
    if len(processors) < 2:
        raise OSError(errno.EINVAL, "there is only one processor")
    os.sched_setaffinity(os.getppid(), {max(processors)})
    return "init runs on processor %d alone" % max(processors)


# Looking.


def leftovers_find(args: Mapping[str, Any], ctx: Mapping[str, Any], reply: Reply) -> None:
    """What is there of a planting: kind -> what was seen."""
    name = args["name"]
    seen: Kinds = {kind: path for kind, path in paths(name, ctx["home"]).items() if os.path.lexists(path)}
    if "file" not in seen:
        names = os.listdir(ctx["home"])
        if names:
            seen["file"] = "the workspace holds %d files" % len(names)
    seen.update(("cron_file", folder) for folder in _CRON if os.path.lexists(os.path.join(folder, name)))
    seen.update(("sysv_" + kind, "key %d" % sysv_key(name, kind)) for kind in _SYSV if _has_sysv(name, kind))
    if _has_queue(name):
        seen["mqueue"] = "/" + name
    _look_at_lock(name, seen)
    _look_at_sockets(name, args["inode"], seen)
    _look_at_processes(name, seen)
    _look_at_self(name, args, seen)
    reply.ok(seen=seen)


def _look_at_lock(name: str, seen: Kinds) -> None:
    try:
        fd = os.open("/tmp/%s-lock" % name, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        seen["tmp_file"] = "the file of the lock"
    except BlockingIOError:
        seen["lock"] = "held"
    finally:
        os.close(fd)


def _look_at_sockets(name: str, inode: int, seen: Kinds) -> None:
    with open("/proc/net/unix", "rb") as file:
        if any(line.rstrip().endswith(b"@" + name.encode()) for line in file):
            seen["abstract_socket"] = "@" + name
    with open("/proc/net/tcp", "rb") as file:
        if inode and any(line.split()[9:10] == [b"%d" % inode] for line in file):
            seen["tcp_socket"] = "inode %d" % inode


def _look_at_processes(name: str, seen: Kinds) -> None:
    for pid in filter(str.isdigit, os.listdir("/proc")):
        marker = _marker(pid, name)
        if marker:
            seen[marker] = "pid %s" % pid


def _marker(pid: str, name: str) -> str:
    """The kind of a planted process; empty: it is none."""
    try:
        with open("/proc/%s/cmdline" % pid, "rb") as file:
            words = file.read().split(b"\0")
    except OSError:
        return ""
    for word in words:
        if word.startswith(name.encode() + b"-"):
            return word[len(name) + 1 :].decode("ascii", "replace")
    return ""


def _look_at_self(name: str, args: Mapping[str, Any], seen: Kinds) -> None:
    """What this process has from init, every other one of the slot has as well."""
    if os.environ.get("SANDBOX_LEFT", "").startswith(name) or resource.getrlimit(resource.RLIMIT_NOFILE)[0] == OPEN_FILES:
        seen["environment"] = "a new process has it"
    if os.getpriority(os.PRIO_PROCESS, os.getppid()) == NICE != args["nice"]:
        seen["priority"] = "init has the nice value %d" % NICE
    if len(os.sched_getaffinity(os.getppid())) < args["processors"]:
        seen["affinity"] = "init runs on %d processors" % len(os.sched_getaffinity(os.getppid()))
