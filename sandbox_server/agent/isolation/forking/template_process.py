"""One template process: what the agent sends it, and what it answers."""

from __future__ import annotations

import array
import asyncio
import dataclasses
import errno
import logging
import marshal
import os
import socket
import subprocess
from typing import Any, ClassVar, Mapping, Sequence, Set

from sandbox_server.agent.errors import StartFailed
from sandbox_server.agent.execution.init_client.descriptors import TEMPORARY_ERRORS
from sandbox_server.agent.init.reports import MARSHAL_VERSION
from sandbox_server.agent.isolation import init_start
from sandbox_server.agent.isolation.forking.forked_init import ForkedInit, add_child, find_unknown_inits, remove_template
from sandbox_server.agent.isolation.forking.template_check import check_template
from sandbox_server.agent.template.messages import ANSWER, ENVIRONMENT, REQUEST

log = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 15.0
_ANSWER_BYTES = 4096
_SET_UP = 0
_TEMPLATE_CODE = (
    "import sys; sys.path.insert(0, %r); from sandbox_server.agent.template import shared_memory; shared_memory.prepare(); "
    "from sandbox_server.agent.template.template import main; main()"
)
_LAUNCHER_CODE = "import sys; sys.path.insert(0, %r); from sandbox_server.agent.template.launcher import main; main()"
_TEMPORARY_FORK_ERRORS = TEMPORARY_ERRORS | {errno.ENOSPC}  # ENOSPC: the kernel has reached its limit of namespaces.


@dataclasses.dataclass(frozen=True)
class Launcher:
    """How a template gets into a mount namespace.

    Args:
        mounts_fd: the descriptor of the namespace.
        users_fd: the descriptor of the user namespace that owns it; -1 if that is the user namespace of the agent.
        python: the interpreter that joins it, as the agent sees it.
        lib: the folder with the code of the launcher, as the agent sees it.
        environment: the environment variables of that interpreter.
    """

    mounts_fd: int
    users_fd: int
    python: str
    lib: str
    environment: Mapping[str, str]


class TemplateLost(StartFailed):
    """The template has ended, or does not answer. Another one can be started."""

    def __init__(self, detail: str) -> None:
        super().__init__(detail, temporary=True)


class TemplateProcess:
    """A running template. All methods run in the event loop.

    Args:
        process: the process. It has been started in the main thread, to which its parent-death signal is bound.
        sock: the agent's end of its socket. This object closes it.
    """

    _running: ClassVar[Set[TemplateProcess]] = set()
    _has_unknown_inits: ClassVar[bool] = False  # whether a template has ended that may have forked inits before it could report them

    def __init__(self, process: subprocess.Popen[bytes], sock: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._process = process
        self._sock = sock
        self._last_number = _SET_UP
        self._answers: dict[int, asyncio.Future[int]] = {}
        self._reaping: set[asyncio.Task[bool]] = set()
        self.is_closed = False
        add_child(process.pid)
        TemplateProcess._running.add(self)
        sock.setblocking(False)
        self._loop.add_reader(sock.fileno(), self._read_answers)

    @property
    def pid(self) -> int:
        """The process id of the template."""
        return self._process.pid

    async def set_up(self, request: Mapping[str, Any]) -> None:
        """Send the template its settings, and wait until it can fork inits.

        Args:
            request: see `start_template`, with `parent`.

        Raises:
            StartFailed: it could not set itself up; the text says why.
        """
        if await self._ask(_SET_UP, 0, request, ()) != self.pid:
            raise StartFailed("another process than the template has answered")

    async def fork_init(self, namespaces: int, request: Mapping[str, Any], fds: Sequence[int]) -> ForkedInit:
        """Let the template fork the init of a slot.

        Args:
            namespaces: the `CLONE_NEW*` flags of the namespaces that the slot gets of its own.
            request: see `slot_view.enter_slot`.
            fds: the control socket of init, the detached mounts, and the descriptors of the control groups. The caller closes its own.

        Raises:
            TemplateLost: the template has ended.
            StartFailed: the template could not fork.
        """
        self._last_number += 1
        return ForkedInit(await self._ask(self._last_number, namespaces, request, fds))

    async def _ask(self, number: int, namespaces: int, request: Mapping[str, Any], fds: Sequence[int]) -> int:
        if self.is_closed:
            raise TemplateLost("the template of slots has ended")
        answer: asyncio.Future[int] = self._loop.create_future()
        message = REQUEST.pack(number, namespaces) + marshal.dumps(dict(request), MARSHAL_VERSION)
        try:
            self._sock.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else [])
        except OSError as error:
            if error.errno in TEMPORARY_ERRORS:
                raise StartFailed("a request could not be sent to the template of slots: %s" % error, temporary=True, errno=error.errno or 0) from None
            self.close_template("its socket failed: %s" % error)
            raise TemplateLost("the template of slots has ended") from None
        self._answers[number] = answer
        try:
            return await asyncio.wait_for(answer, ANSWER_TIMEOUT_S)
        except asyncio.CancelledError:
            self._reap_answer(number, answer)
            raise
        except asyncio.TimeoutError:
            self._reap_answer(number, answer)
            self.close_template("it did not answer within %g s" % ANSWER_TIMEOUT_S)
            raise TemplateLost("the template of slots did not answer within %g s" % ANSWER_TIMEOUT_S) from None

    def _read_answers(self) -> None:
        while not self.is_closed:
            try:
                data = self._sock.recv(_ANSWER_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                self.close_template("its socket failed: %s" % error)
                return
            if len(data) < ANSWER.size:
                self.close_template("it has ended" if not data else "it broke its protocol")
                return
            number, result = ANSWER.unpack_from(data)
            self._handle_answer(number, result, data[ANSWER.size :].decode("utf-8", "replace"))

    def _handle_answer(self, number: int, result: int, text: str) -> None:
        answer = self._answers.pop(number, None)
        if answer is None or answer.done():
            if result > 0 and number != _SET_UP:
                self._reap(ForkedInit(result))  # Nobody waits for this init any more.
        elif result > 0:
            add_child(result)
            answer.set_result(result)
        else:
            answer.set_exception(StartFailed("the template of slots: %s" % (text or os.strerror(-result)), temporary=-result in _TEMPORARY_FORK_ERRORS))
        self._reap_unknown_inits()

    def _reap_answer(self, number: int, answer: asyncio.Future[int]) -> None:
        """End the init that an answer names which came in the very turn of the event loop in which its request was given up."""
        if number != _SET_UP and answer.done() and not answer.cancelled() and answer.exception() is None:
            self._reap(ForkedInit(answer.result()))

    def _reap(self, init: ForkedInit) -> None:
        init.kill()
        task = self._loop.create_task(init_start.wait_for_exit(init, ANSWER_TIMEOUT_S))
        self._reaping.add(task)
        task.add_done_callback(self._reaping.discard)

    def close_template(self, reason: str = "") -> None:
        """End the template. Inits that it has forked for nobody are ended, too; all others run on.

        Args:
            reason: why it ends unexpectedly; empty if the agent needs it no longer.
        """
        if self.is_closed:
            return
        self.is_closed = True
        if reason:
            log.warning("the template of slots is replaced: %s", reason)
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        remove_template(self.pid)
        TemplateProcess._running.discard(self)
        if self._answers:
            TemplateProcess._has_unknown_inits = True
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            if not answer.done():
                answer.set_exception(TemplateLost("the template of slots has ended"))
        self._reap_unknown_inits()

    def _reap_unknown_inits(self) -> None:
        """End the inits that ended templates have forked before they could report them. They are children of this agent, and nobody else knows them.

        An init that nobody knows may also be one that a running template is about to report, so this waits until no answer is outstanding.
        """
        if TemplateProcess._has_unknown_inits and not any(template._answers for template in TemplateProcess._running):
            TemplateProcess._has_unknown_inits = False
            for init in find_unknown_inits():
                self._reap(init)


async def start_template(
    python: str, lib: str, request: Mapping[str, Any], environment: Mapping[str, str], launcher: Launcher | None = None
) -> TemplateProcess:
    """Start a template, and wait until it can fork inits.

    Args:
        python: the interpreter, as the template sees it.
        lib: the folder with the code of the template, as the template sees it.
        request: how the template confines itself, see `template._confine_template`, without `parent`; `filters`: the system call filters of its slots.
        environment: the environment variables of the template. The interpreter ignores all but those of the dynamic linker.
        launcher: joins a mount namespace before the template is executed; None if the template sees what the agent sees.

    Raises:
        StartFailed: the template could not be started or set up; the text says why.
    """
    try:
        stderr_r, stderr_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise _start_failed("a pipe", error) from None
    try:
        template = _spawn_template(python, lib, environment, launcher, stderr_w)
    except OSError as error:
        os.close(stderr_r)
        raise _start_failed(python, error) from None
    finally:
        os.close(stderr_w)
    try:
        await template.set_up({**request, "parent": os.getpid()})
        check_template(template.pid, request["capabilities"], request.get("joins_networks", False))
    except (StartFailed, OSError) as error:
        template.close_template()
        text = init_start.with_stderr("the template of slots could not be started: %s" % error, stderr_r)
        raise StartFailed(text, temporary=_is_temporary(error)) from None
    except BaseException:  # also when this task is cancelled
        template.close_template()
        raise
    finally:
        os.close(stderr_r)
    return template


def _is_temporary(error: StartFailed | OSError) -> bool:
    """Return whether a template can be started later, because the machine was short of something. One that ends or hangs at once does so again."""
    return error.errno in TEMPORARY_ERRORS if isinstance(error, OSError) else error.temporary and not isinstance(error, TemplateLost)


def _start_failed(subject: str, error: OSError) -> StartFailed:
    return StartFailed("%s: %s" % (subject, error.strerror), temporary=_is_temporary(error))


def _spawn_template(python: str, lib: str, environment: Mapping[str, str], launcher: Launcher | None, stderr_fd: int) -> TemplateProcess:
    agent_end, template_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    argv = [python, "-I", "-S", "-B", "-c", _TEMPLATE_CODE % lib, str(template_end.fileno())]
    try:
        return TemplateProcess(_spawn(argv, environment, launcher, template_end.fileno(), stderr_fd), agent_end)
    except OSError:
        agent_end.close()
        raise
    finally:
        template_end.close()


def _spawn(argv: list[str], environment: Mapping[str, str], launcher: Launcher | None, socket_fd: int, stderr_fd: int) -> subprocess.Popen[bytes]:
    pass_fds = [socket_fd]
    own_environment = {**environment, **ENVIRONMENT}
    if launcher is not None:
        pass_fds += [fd for fd in (launcher.mounts_fd, launcher.users_fd) if fd >= 0]
        own = [launcher.python, "-I", "-S", "-B", "-c", _LAUNCHER_CODE % launcher.lib, str(launcher.mounts_fd), str(launcher.users_fd)]
        argv = [*own, environment.get("LD_LIBRARY_PATH", ""), *argv]
        own_environment = dict(launcher.environment)
    # This runs in the main thread, because the parent-death signals of the template and of its inits are bound to the thread that forks.
    return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr_fd, pass_fds=pass_fds, env=own_environment, cwd="/")
