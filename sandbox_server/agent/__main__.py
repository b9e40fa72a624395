"""`python AGENT.pyz`: reads the configuration from standard input, and runs the agent until it is to end."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import selectors
import signal
import sys
import time
from typing import Any, Coroutine

from sandbox_server.agent.config import AgentConfig, ConfigError, parse_config
from sandbox_server.agent.server.agent import Agent


class _JsonLines(logging.Formatter):
    """Formats each log record as one line with a JSON object."""

    def __init__(self, sandbox_id: str) -> None:
        super().__init__()
        self._sandbox_id = sandbox_id

    def format(self, record: logging.LogRecord) -> str:
        line = {"ts": record.created, "level": record.levelname.lower(), "sandbox_id": self._sandbox_id, "message": record.getMessage()}
        for name in ("slot_id", "detail"):
            if hasattr(record, name):
                line[name] = getattr(record, name)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def _set_up_process(config: AgentConfig) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines(config.sandbox_id))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    os.umask(0o077)
    for name in list(os.environ):
        if name not in ("LD_LIBRARY_PATH", "PATH"):  # the interpreter may need LD_LIBRARY_PATH; bubblewrap is searched for in PATH
            del os.environ[name]


def _close_stdin() -> None:
    """Close the standard input, which has been read to its end. A backend that keeps the other end of a socket open learns so that the agent listens."""
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(null, 0)
    os.close(null)


async def _run(config: AgentConfig) -> None:
    agent = Agent(config, _close_stdin)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, agent.stopping.set)
    await agent.run_agent()


def _make_event_loop() -> asyncio.AbstractEventLoop:
    """Make the event loop.

    The kernel limits how many descriptors one user may watch with `epoll`. The slots of an agent that is not root have the same user as the agent and could
    use that number up, so such an agent uses `poll`, which has no such limit.
    """
    return asyncio.SelectorEventLoop(selectors.EpollSelector() if os.geteuid() == 0 else selectors.PollSelector())


def _run_in_loop(main_coroutine: Coroutine[Any, Any, None]) -> None:
    """Do what `asyncio.run` does, in the event loop of our choice. `asyncio.run` accepts a loop factory from Python 3.12 on only."""
    loop = _make_event_loop()
    asyncio.set_event_loop(loop)
    try:
        loop.run_until_complete(main_coroutine)
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        asyncio.set_event_loop(None)
        loop.close()


def main() -> int:
    """Run the agent. Returns the exit code of the process."""
    try:
        config = parse_config(sys.stdin.buffer.read())
    except ConfigError as error:
        sys.stderr.write(json.dumps({"ts": time.time(), "level": "error", "message": str(error)}) + "\n")
        return 2
    _set_up_process(config)
    _run_in_loop(_run(config))
    return 0


if __name__ == "__main__":
    sys.exit(main())
