"""The agent's side of its network process: starts it, and takes networks for slots from it."""

from __future__ import annotations

import array
import asyncio
import json
import logging
import os
import socket
import subprocess
from collections import deque
from typing import Any, Callable, Deque, Mapping, Sequence, Tuple

from sandbox_server.agent import network
from sandbox_server.agent.config import AgentConfig
from sandbox_server.agent.errors import StartFailed
from sandbox_server.agent.execution.init_client.descriptors import TEMPORARY_ERRORS
from sandbox_server.agent.execution.slot_runtime import SlotNetwork
from sandbox_server.agent.kernel.uids import UidRange
from sandbox_server.agent.network.network_messages import LIMIT, MAKE, MESSAGE_BYTES, RELEASE

log = logging.getLogger(__name__)

_CODE = "import sys; sys.path.insert(0, %r); from sandbox_server.agent.network.process import main; main()"
_ANSWER_WITHIN_S = 15.0
_ENDS_WITHIN_S = 5.0
_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH")
_Answer = Tuple[Mapping[str, Any], Sequence[int]]


class SlotNetworks:
    """The networks of the slots of one agent. All methods run in the event loop.

    Args:
        config: the configuration of the agent; its `allow_hosts` and `allow_private` say what slots may reach.
        python: the interpreter.
        uids: the users of the slots, one of which the network process gets; None if the agent does not run as root.
        on_lost: called with the reason when the network process has ended, and with it the network of all slots.
    """

    def __init__(self, config: AgentConfig, python: str, uids: UidRange | None, on_lost: Callable[[str], None]) -> None:
        self._config = config
        self._python = python
        self._uids = uids
        self._on_lost = on_lost
        self._start_lock = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._answers: Deque[asyncio.Future[_Answer]] = deque()
        self._problem: str | None = None
        self.users_fd = -1

    async def start_networks(self) -> None:
        """Start the network process, if it does not run yet.

        Raises:
            StartFailed: it could not be started, now or at an earlier call; the text says why.
        """
        async with self._start_lock:
            if self._problem is None and self.users_fd < 0:
                try:
                    await self._start_process()
                except (StartFailed, OSError) as error:
                    self._problem = "the network `internet` cannot be given to slots here: %s" % error
                    self.close_networks()
                except BaseException:  # also when this task is cancelled: the next one starts another process
                    self.close_networks()
                    raise
        if self._problem is not None:
            raise StartFailed(self._problem)

    async def _start_process(self) -> None:
        own, others = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own.setblocking(False)
        folder = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(network.__path__[0]))))
        argv = [self._python, "-I", "-S", "-B", "-c", _CODE % folder, str(others.fileno())]
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        self._sock = own
        try:
            # This runs in the main thread, to which the parent-death signal of the process is bound. What it logs goes where the agent's log goes.
            self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=(others.fileno(),), env=environment, cwd="/")
        finally:
            others.close()
        asyncio.get_running_loop().add_reader(own.fileno(), self._read_answers)
        hosts = self._config.allow_hosts
        settings = {
            "allow_hosts": None if hosts is None else list(hosts),
            "allow_private": list(self._config.allow_private),
            "slots": self._config.slots,
            "uid": self._uids.take_uid() if self._uids is not None else None,
            "parent": os.getpid(),
        }
        _, fds = await self._ask(settings)
        self.users_fd = fds[0]

    async def take_network(self) -> SlotNetwork:
        """Return a network that no slot has had.

        Raises:
            StartFailed: there is none; the text says why.
        """
        await self.start_networks()
        try:
            answer, fds = await self._ask({"op": MAKE})
        except OSError as error:
            raise StartFailed("a network for a slot: %s" % error, temporary=error.errno in TEMPORARY_ERRORS) from None
        return SlotNetwork(answer["number"], fds[0])

    async def release_network(self, network: SlotNetwork) -> None:
        """Remove a network, with its links, its rules and what is known about its names.

        Raises:
            OSError: it could not be removed.
            StartFailed: the network process has ended; the network ends with it.
        """
        await self._ask({"op": RELEASE, "number": network.number})

    async def limit_network(self, network: SlotNetwork, allow_hosts: Sequence[str]) -> None:
        """Let a slot whose processes have not used its network yet reach these hosts alone.

        Raises:
            OSError: it could not be limited.
            StartFailed: the network process has ended.
        """
        await self._ask({"op": LIMIT, "number": network.number, "allow_hosts": list(allow_hosts)})

    async def _ask(self, request: Mapping[str, Any]) -> _Answer:
        if self._sock is None:
            raise StartFailed(self._problem or "the network process has ended")
        self._sock.send(json.dumps(request).encode())
        answer: asyncio.Future[_Answer] = asyncio.get_running_loop().create_future()
        self._answers.append(answer)
        try:
            return await asyncio.wait_for(asyncio.shield(answer), _ANSWER_WITHIN_S)
        except asyncio.TimeoutError:
            self._fail("it did not answer within %g s" % _ANSWER_WITHIN_S)
            raise StartFailed("the network process did not answer within %g s" % _ANSWER_WITHIN_S) from None
        except asyncio.CancelledError:
            answer.add_done_callback(self._undo_answer)
            raise

    def _undo_answer(self, answer: asyncio.Future[_Answer]) -> None:
        """Give back the network that was made for a slot whose start was cancelled."""
        if answer.cancelled() or answer.exception() is not None:
            return
        made, fds = answer.result()
        for fd in fds:
            os.close(fd)
        if "number" in made and self._sock is not None:
            try:
                self._sock.send(json.dumps({"op": RELEASE, "number": made["number"]}).encode())
            except OSError as error:
                self._fail("it takes no requests: %s" % error)
                return
            self._answers.append(asyncio.get_running_loop().create_future())

    def _read_answers(self) -> None:
        while self._sock is not None:
            fds = array.array("i")
            try:
                data, ancillary, _, _ = self._sock.recvmsg(MESSAGE_BYTES, socket.CMSG_SPACE(fds.itemsize), socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            except OSError as error:
                self._fail(str(error))
                return
            for _, _, packed in ancillary:
                fds.frombytes(packed[: len(packed) - len(packed) % fds.itemsize])
            if not data:
                self._fail("it has ended")
                return
            self._handle_answer(json.loads(data), list(fds))

    def _handle_answer(self, answer: Mapping[str, Any], fds: Sequence[int]) -> None:
        if not self._answers:
            self._fail(str(answer.get("error", "it broke its protocol")))
            return
        waiting = self._answers.popleft()
        if answer["ok"]:
            waiting.set_result((answer, fds))
        else:
            waiting.set_exception(OSError(answer["errno"], answer["error"]))
            waiting.exception()  # Nobody may wait for it any more.

    def _fail(self, reason: str) -> None:
        was_running = self.users_fd >= 0
        if self._problem is None:
            self._problem = "the network process has ended: %s" % reason
        self.close_networks()
        if was_running:
            log.error("the network of the slots is lost: %s", reason)
            self._on_lost(reason)

    def close_networks(self) -> None:
        """End the network process, and with it the networks of all slots."""
        sock, self._sock = self._sock, None
        if sock is not None:
            asyncio.get_running_loop().remove_reader(sock.fileno())
            sock.close()
        if self.users_fd >= 0:
            os.close(self.users_fd)
            self.users_fd = -1
        for answer in self._answers:
            if not answer.done():
                answer.set_exception(StartFailed(self._problem or "the agent ends"))
                answer.exception()
        self._answers.clear()
        process, self._process = self._process, None
        if process is not None:
            process.kill()  # The kernel then ends the router and the uplink. Their user is not used again: they need a moment.
            process.wait()
