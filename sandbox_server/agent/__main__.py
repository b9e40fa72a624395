"""`python AGENT.pyz`: reads its configuration from stdin, serves until told to end."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import signal
import sys
import time

from sandbox_server.agent.agent import Agent
from sandbox_server.agent.config import AgentConfig, ConfigError, parse_config


class _JsonLines(logging.Formatter):
    """One JSON object a line."""

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
        if name not in ("LD_LIBRARY_PATH", "PATH"):  # the interpreter may need the one; bubblewrap is looked for in the other
            del os.environ[name]


async def _run(config: AgentConfig) -> None:
    agent = Agent(config)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, agent.over.set)
    await agent.run()


def main() -> int:
    """Run the agent; the exit code."""
    try:
        config = parse_config(sys.stdin.buffer.read())
    except ConfigError as error:
        sys.stderr.write(json.dumps({"ts": time.time(), "level": "error", "message": str(error)}) + "\n")
        return 2
    _set_up_process(config)
    asyncio.run(_run(config))
    return 0


if __name__ == "__main__":
    sys.exit(main())
