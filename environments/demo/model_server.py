"""A model server that plays written trajectories over HTTP: OpenAI chat completions, and `/generate` of vLLM and SGLang.

As a library it runs in the event loop of the caller::

    async with ScriptedModelServer(script, tokenizer=TextTokenizer.load(folder)) as server:
        client = openai.AsyncClient(base_url=server.base_url, api_key="x")

and as a process it prints its address::

    python -m environments.demo.model_server --script FILE --tokenizer DIR --port 0
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
import sys
from collections.abc import Awaitable, Callable, Generator, Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import uvicorn

from environments.demo.answers import AnswerWriter
from environments.demo.application import Event, ModelApplication, Receive, Send
from environments.demo.request_log import RequestLog, RequestRecord
from environments.demo.script import Script, ScriptError, load_script, parse_script
from environments.demo.tokenizer import TextTokenizer

#: How long the server waits for requests that are being answered when it stops, in seconds.
_STOP_TIMEOUT_S = 2
#: An ASGI application.
Application = Callable[[Event, Receive, Send], Awaitable[None]]


class LocalServer:
    """A model server on a port of this machine, for the time of an `async with` block.

    Args:
        application: answers the requests.
        port: the port; 0 for a free one.
    """

    def __init__(self, application: Application, port: int = 0) -> None:
        self._application = application
        self._port = port
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def base_url(self) -> str:
        """The address for OpenAI clients, which ends in `/v1`. `/generate` and `/health` are one level above it."""
        return f"http://127.0.0.1:{self._port}/v1"

    async def __aenter__(self) -> Self:
        await self.start(handle_signals=False)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        await self.stop()

    async def start(self, *, handle_signals: bool) -> None:
        """Start the server; return when it listens.

        Args:
            handle_signals: whether SIGINT and SIGTERM stop the server.

        Raises:
            OSError: the port is not free.
        """
        listener = socket.create_server(("127.0.0.1", self._port))
        self._port = listener.getsockname()[1]
        config = uvicorn.Config(
            self._application,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=_STOP_TIMEOUT_S,
            server_header=False,
            date_header=False,
        )
        self._server = _Server(config, handle_signals=handle_signals)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]), name="model server")
        ready = asyncio.create_task(self._server.ready.wait())
        await asyncio.wait({ready, self._serving}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if self._serving.done():
            await self._serving

    async def wait_until_stopped(self) -> None:
        """Wait until a signal stopped the server."""
        if self._serving:
            await self._serving

    async def stop(self) -> None:
        """Stop the server."""
        if self._server and self._serving:
            self._server.stopping.set()
            await self._serving


class ScriptedModelServer(LocalServer):
    """A model server on a free port of this machine, for the time of an `async with` block.

    Args:
        script: the script, or the dictionary that describes it.
        tokenizer: the tokenizer, or its folder; without one only chat completions are served.
        port: the port; 0 for a free one.
        max_records: how many requests are kept for inspection.

    Raises:
        ScriptError: the script is not valid.
    """

    def __init__(self, script: Script | Mapping[str, Any], *, tokenizer: TextTokenizer | Path | None = None, port: int = 0, max_records: int = 10_000) -> None:
        self.script = script if isinstance(script, Script) else parse_script(script)
        self._tokenizer = TextTokenizer.load(tokenizer) if isinstance(tokenizer, Path) else tokenizer
        self._log = RequestLog(max_records)
        self._scripted = ModelApplication(self.script, AnswerWriter(self.script, self._tokenizer), self._tokenizer, self._log)
        super().__init__(self._scripted, port)

    @property
    def requests(self) -> list[RequestRecord]:
        """The latest requests for answers, in the order of their arrival."""
        return self._log.records

    @property
    def request_count(self) -> int:
        """How many requests for answers came."""
        return self._log.count

    @property
    def conversation_count(self) -> int:
        """How many conversations began."""
        return self._scripted.conversation_count

    async def wait_for_request(self, matches: Callable[[RequestRecord], bool]) -> RequestRecord:
        """Wait for a request, among those that came and those that come.

        Args:
            matches: returns whether it is the one.
        """
        return await self._log.wait_for(matches)

    async def stop(self) -> None:
        """Stop the server. Requests that it leaves unanswered on purpose are cut."""
        self._scripted.close()
        await super().stop()


class _Server(uvicorn.Server):
    """uvicorn's server, which reports that it listens, stops at once, and leaves the signals of the process alone unless it is the program.

    uvicorn itself looks every tenth of a second whether it has been told to stop, and then waits for another tenth.

    Args:
        config: uvicorn's configuration.
        handle_signals: whether signals stop the server.
    """

    def __init__(self, config: uvicorn.Config, *, handle_signals: bool) -> None:
        super().__init__(config)
        self.ready, self.stopping = asyncio.Event(), asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._handle_signals = handle_signals

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self._loop.call_soon_threadsafe(self.stopping.set)

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self.stopping.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for listener in sockets or []:
            listener.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        await asyncio.sleep(0)  # the connections that have been closed are reported in the next iteration of the event loop
        await asyncio.sleep(0)
        # `super().shutdown` would close every connection a second time.
        try:
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                await self._wait_tasks_to_complete()  # it looks every tenth of a second
        except TimeoutError:  # what the script leaves unanswered on purpose
            for task in self.server_state.tasks:
                task.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        if not self._handle_signals:
            yield
            return
        with super().capture_signals():
            yield


async def _serve(script: Script, tokenizer: Path | None, port: int) -> None:
    server = ScriptedModelServer(script, tokenizer=tokenizer, port=port)
    await server.start(handle_signals=True)
    sys.stdout.write(server.base_url + "\n")
    sys.stdout.flush()
    try:
        await server.wait_until_stopped()
    finally:
        await server.stop()


def main(arguments: list[str] | None = None) -> int:
    """Serve a script until SIGINT or SIGTERM. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m environments.demo.model_server", description="Serve the trajectories of a script as a model.")
    parser.add_argument("--script", type=Path, required=True, help="the script, a YAML or JSON file")
    parser.add_argument("--tokenizer", type=Path, help="the folder of the tokenizer, which /generate needs")
    parser.add_argument("--port", type=int, default=0, help="the port; 0 for a free one")
    options = parser.parse_args(arguments)
    try:
        asyncio.run(_serve(load_script(options.script), options.tokenizer, options.port))
    except (ScriptError, OSError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except KeyboardInterrupt:  # uvicorn raises the signal again after it has stopped
        return 0
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
