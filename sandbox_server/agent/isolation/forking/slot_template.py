"""Keeps one template running, and starts another one when it has ended."""

from __future__ import annotations

import asyncio
from typing import Any, Awaitable, Callable, Mapping, Sequence

from sandbox_server.agent.errors import StartFailed
from sandbox_server.agent.isolation import init_start
from sandbox_server.agent.isolation.forking.template_process import TemplateProcess

#: How many slots try to start a template for the first time, if it fails because the machine is short of something. Then slots are executed for good.
MAX_FIRST_TRIES = 3


class SlotTemplate:
    """A template that is started when it is first needed. If it has ended, the next slot starts another one; slots that run do not depend on it.

    Args:
        start: starts a template process and waits until it can fork inits.
    """

    def __init__(self, start: Callable[[], Awaitable[TemplateProcess]]) -> None:
        self._start = start
        self._process: TemplateProcess | None = None
        self._start_lock = asyncio.Lock()

    async def start_init(
        self, namespaces: int, request: Mapping[str, Any], mount_fds: Sequence[int], join_fds: Sequence[int], init_config: Mapping[str, Any], sets_floor: bool
    ) -> init_start.StartedInit:
        """Fork the init of a slot, and wait until it serves requests.

        Args:
            namespaces: the `CLONE_NEW*` flags of the namespaces that the slot gets of its own.
            request: see `slot_view.enter_slot`, without `joins`.
            mount_fds: the detached mounts of the slot. The caller closes them.
            join_fds: descriptors through which init joins its control groups. The caller closes them.
            init_config: the configuration of init.
            sets_floor: whether the minimum `oom_score_adj` of the slot is set.

        Raises:
            StartFailed: the start failed; the text says why.
        """
        template = await self._running_template()
        agent_socket, init_socket = init_start.create_control_sockets()
        try:
            init = await template.fork_init(namespaces, {**request, "joins": len(join_fds)}, [init_socket.fileno(), *mount_fds, *join_fds])
        except BaseException:  # also when this task is cancelled: an init that is forked nevertheless ends when it reads the end of its socket
            agent_socket.close()
            raise
        finally:
            init_socket.close()
        started_init = await init_start.wait_until_ready(init, agent_socket, {**init_config, "join": []}, -1, sets_floor)
        if started_init.pid != init.pid:
            raise ValueError("process %d has answered instead of init %d" % (started_init.pid, init.pid))
        return started_init

    async def _running_template(self) -> TemplateProcess:
        async with self._start_lock:
            if self._process is None:
                self._process = await self._start()
            elif self._process.is_closed:
                self._process = await self._start_again()
            return self._process

    async def _start_again(self) -> TemplateProcess:
        """Replace a template that has ended. Where one has worked before, another one is only missing for a time."""
        try:
            return await self._start()
        except StartFailed as error:
            raise StartFailed(str(error), temporary=True) from None

    def end_template(self) -> None:
        """End the template. A later slot would start another one."""
        if self._process is not None:
            self._process.close_template()
