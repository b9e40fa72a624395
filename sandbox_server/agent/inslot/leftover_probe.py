"""Leftovers that verify a reset: one operation plants leftovers of every kind in a slot, as a rollout could leave them, and another one searches for them.

Both operations run inside the slot with the rights of the slot. All leftovers carry one unique name, so that the search finds only what was planted.
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
from functools import partial

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, List, Mapping, NoReturn

    from sandbox_server.agent.inslot.reply import Reply

    Kinds = Dict[str, str]

DEPTH = 1000
OPEN_FILES = 61  # A limit that nothing else sets.
NICE = 7
_WAIT = "while :; do sleep 3600; done"
_IPC_CREAT = 0o1000
_SHM_BYTES = 4096
SYSV_KINDS = ("shm", "sem", "msg")
_CRON = ("/var/spool/cron/crontabs", "/var/spool/cron", "/var/spool/at", "/var/spool/cron/atjobs", "/etc/cron.d")
_libc = ctypes.CDLL(None, use_errno=True)


def leftover_paths(name: str, home: str) -> Dict[str, str]:
    """Return the path of each planted file by its kind."""
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
    """Return the key of a planted System V object.

    Args:
        name: the name of the leftovers.
        kind: `shm`, `sem` or `msg`.
    """
    return zlib.crc32(("%s-%s" % (name, kind)).encode()) & 0x7FFFFFFF or 1


def leftovers_plant(args: Mapping[str, Any], ctx: Mapping[str, Any], reply: Reply) -> None:
    """Plant every kind of leftover that this slot permits. The reply names what was planted, and what could not be planted and why."""
    name = args["name"]
    planted: List[Dict[str, str]] = []
    refused: List[Dict[str, str]] = []
    sockets: List[int] = []

    def plant(kind: str, create: Callable[[], str]) -> None:
        try:
            planted.append({"kind": kind, "detail": create()})
        except OSError as error:
            refused.append({"kind": kind, "detail": error.strerror or str(error)})

    for kind, path in leftover_paths(name, ctx["home"]).items():
        plant(kind, partial(_plant_path, kind, path))
    plant("cron_file", lambda: _plant_cron(name))
    plant("tcp_socket", lambda: _listen_tcp(sockets))
    plant("abstract_socket", lambda: _listen_abstract(name))
    plant("lock", lambda: _hold_lock(name))
    for kind in SYSV_KINDS:
        plant("sysv_" + kind, partial(_make_sysv, name, kind))
    plant("mqueue", lambda: _make_queue(name))
    for kind, prepare in (("process", _inherit), ("detached_process", _detach), ("deaf_process", _ignore_signals), ("environment", _change_environment)):
        plant(kind, partial(_plant_process, "%s-%s" % (name, kind), args["shell"], prepare))
    nice, processors = os.getpriority(os.PRIO_PROCESS, os.getppid()), len(os.sched_getaffinity(os.getppid()))
    plant("priority", _renice_init)
    plant("affinity", _pin_init)
    reply.send_ok(planted=planted, refused=refused, inode=sockets[0] if sockets else 0, nice=nice, processors=processors)


def _plant_path(kind: str, path: str) -> str:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "symlink":
        os.symlink("/etc/passwd", path)
    elif kind == "closed_folder":
        os.mkdir(path)
        _write_file(os.path.join(path, "inside"))
        os.chmod(path, 0)
    elif kind == "deep_tree":
        _make_deep_tree(path)
    else:
        _write_file(path)
    return path


def _write_file(path: str) -> None:
    with open(path, "wb") as file:  # Binary mode: this slot may not be able to read the modules of the codecs.
        file.write(b"left behind\n")


def _make_deep_tree(path: str) -> None:
    fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for step in [path, *["d"] * DEPTH]:
            os.mkdir(step)
            os.chdir(step)
        _write_file("bottom")
    finally:
        os.fchdir(fd)
        os.close(fd)


def _plant_cron(name: str) -> str:
    reasons = []
    for folder in _CRON:
        path = os.path.join(folder, name)
        try:
            _write_file(path)
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
    _keep_for_children(sock.detach())
    return "127.0.0.1:%d" % port


def _listen_abstract(name: str) -> str:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind("\0" + name)
    sock.listen(1)
    _keep_for_children(sock.detach())
    return "@" + name


def _hold_lock(name: str) -> str:
    path = "/tmp/%s-lock" % name
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    _keep_for_children(fd)
    return path


def _keep_for_children(fd: int) -> None:
    """Make a descriptor inheritable, so that the processes that are planted afterwards keep it open."""
    os.set_inheritable(fd, True)


def _check_result(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def _make_sysv(name: str, kind: str) -> str:
    key = sysv_key(name, kind)
    if kind == "shm":
        _check_result(_libc.shmget(key, ctypes.c_size_t(_SHM_BYTES), _IPC_CREAT | 0o600))
    elif kind == "sem":
        _check_result(_libc.semget(key, 1, _IPC_CREAT | 0o600))
    else:
        _check_result(_libc.msgget(key, _IPC_CREAT | 0o600))
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
        return _check_result(library.mq_open(b"/" + name.encode(), flags, 0o600, None))
    except AttributeError:
        raise OSError(errno.ENOSYS, "this C library has no mq_open") from None


def _make_queue(name: str) -> str:
    os.close(_open_queue(name, os.O_RDWR | os.O_CREAT))
    return "/" + name


def _has_queue(name: str) -> bool:
    try:
        os.close(_open_queue(name, os.O_RDONLY))
    except OSError:
        return False
    return True


def _plant_process(marker: str, shell: str, prepare: Callable[[str], Dict[str, str]]) -> str:
    pid = os.fork()
    if pid == 0:
        _become_leftover(marker, shell, prepare)
    return "pid %d" % pid


def _become_leftover(marker: str, shell: str, prepare: Callable[[str], Dict[str, str]]) -> NoReturn:
    try:
        environment = prepare(marker)
        os.execve(shell, [shell, "-c", _WAIT, marker], environment)
    finally:
        os._exit(1)


def _inherit(marker: str) -> Dict[str, str]:
    return dict(os.environ)


def _detach(marker: str) -> Dict[str, str]:
    os.setsid()
    if os.fork():
        os._exit(0)
    return dict(os.environ)


def _ignore_signals(marker: str) -> Dict[str, str]:
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    return _detach(marker)


def _change_environment(marker: str) -> Dict[str, str]:
    os.umask(0)
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))
    return dict(_detach(marker), SANDBOX_LEFT=marker)


def _renice_init() -> str:
    os.setpriority(os.PRIO_PROCESS, os.getppid(), NICE)
    return "init has the nice value %d" % NICE


def _pin_init() -> str:
    processors = os.sched_getaffinity(os.getppid())
    if len(processors) < 2:
        raise OSError(errno.EINVAL, "there is only one processor")
    os.sched_setaffinity(os.getppid(), {max(processors)})
    return "init runs on processor %d alone" % max(processors)


def leftovers_find(args: Mapping[str, Any], ctx: Mapping[str, Any], reply: Reply) -> None:
    """Search for planted leftovers. The reply maps the kind of each one that exists to a description."""
    name = args["name"]
    found: Kinds = {kind: path for kind, path in leftover_paths(name, ctx["home"]).items() if os.path.lexists(path)}
    if "file" not in found:
        names = os.listdir(ctx["home"])
        if names:
            found["file"] = "the workspace holds %d files" % len(names)
    found.update(("cron_file", folder) for folder in _CRON if os.path.lexists(os.path.join(folder, name)))
    found.update(("sysv_" + kind, "key %d" % sysv_key(name, kind)) for kind in SYSV_KINDS if _has_sysv(name, kind))
    if _has_queue(name):
        found["mqueue"] = "/" + name
    _find_lock(name, found)
    _find_sockets(name, args["inode"], found)
    _find_processes(name, found)
    _find_inherited(name, args, found)
    reply.send_ok(found=found)


def _find_lock(name: str, found: Kinds) -> None:
    try:
        fd = os.open("/tmp/%s-lock" % name, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found["tmp_file"] = "the file of the lock"
    except BlockingIOError:
        found["lock"] = "held"
    finally:
        os.close(fd)


def _find_sockets(name: str, inode: int, found: Kinds) -> None:
    with open("/proc/net/unix", "rb") as file:
        if any(line.rstrip().endswith(b"@" + name.encode()) for line in file):
            found["abstract_socket"] = "@" + name
    with open("/proc/net/tcp", "rb") as file:
        if inode and any(line.split()[9:10] == [b"%d" % inode] for line in file):
            found["tcp_socket"] = "inode %d" % inode


def _find_processes(name: str, found: Kinds) -> None:
    for pid in filter(str.isdigit, os.listdir("/proc")):
        marker = _planted_kind(pid, name)
        if marker:
            found[marker] = "pid %s" % pid


def _planted_kind(pid: str, name: str) -> str:
    """Return the kind of a planted process, or an empty string for any other process."""
    try:
        with open("/proc/%s/cmdline" % pid, "rb") as file:
            words = file.read().split(b"\0")
    except OSError:
        return ""
    for word in words:
        if word.startswith(name.encode() + b"-"):
            return word[len(name) + 1 :].decode("ascii", "replace")
    return ""


def _find_inherited(name: str, args: Mapping[str, Any], found: Kinds) -> None:
    """Check what this process has inherited from init. Every other process of the slot inherits the same."""
    if os.environ.get("SANDBOX_LEFT", "").startswith(name) or resource.getrlimit(resource.RLIMIT_NOFILE)[0] == OPEN_FILES:
        found["environment"] = "a new process has it"
    if os.getpriority(os.PRIO_PROCESS, os.getppid()) == NICE != args["nice"]:
        found["priority"] = "init has the nice value %d" % NICE
    if len(os.sched_getaffinity(os.getppid())) < args["processors"]:
        found["affinity"] = "init runs on %d processors" % len(os.sched_getaffinity(os.getppid()))
