"""The service from the command line: serve, check-config, print-config."""

from __future__ import annotations

import os
import signal
import sys

if __name__ == "__main__":
    # Before the other imports, which take nearly a second: until they are done, nothing has been started that a stop would have to undo.
    # `sys.exit` would be lost wherever Python ignores exceptions, as in the callbacks of the import system.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))

import argparse
import asyncio
import dataclasses
import gc
import json
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import uvicorn

from sandbox_server.api.tenants import Tenant
from sandbox_server.app import Application, Parts, load_backends, print_line
from sandbox_server.backends.registry import load_backend
from sandbox_server.settings import Settings, SettingsError, load_settings
from sandbox_server.state_dir import StateDir, StateDirError
from sandbox_server.uvicorn_server import PromptServer

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8700
INVALID_SETTINGS = 2
NOT_STARTED = 3
BACKLOG = 2048
KEEP_ALIVE_S = 75
"""How long an idle connection is kept, in seconds; longer than clients keep theirs, so that they close first."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """The options of `serve`.

    Args:
        host: the address to listen on.
        port: the port to listen on; 0 means a free one.
        ready_fd: a file descriptor to which a line of JSON with the `url` is written once the server listens; None: none.
        parent_pid: the process with which the service stops, and with the end of standard input; None: it stops on signals alone.
        ephemeral: whether every sandbox is destroyed and the state folder removed when the service stops.
    """

    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    ready_fd: int | None = None
    parent_pid: int | None = None
    ephemeral: bool = False


class EarlyStopHandler:
    """Handles SIGTERM before the server does, and remembers that it was received."""

    def __init__(self) -> None:
        self.is_stop_requested = False

    def install(self) -> None:
        """Install the handler. uvicorn restores it when the server has ended, and then raises again the signals that ended the server."""
        signal.signal(signal.SIGTERM, self._remember)

    def _remember(self, *_: object) -> None:
        self.is_stop_requested = True


class Server(PromptServer):
    """The server of the service, which also reports its address once it listens, and can stop when its parent process ends.

    Args:
        config: uvicorn's configuration.
        application: the application that it serves.
        options: the options of `serve`.
        early_stop: reports whether SIGTERM was received before the server handled signals; in that case nothing is started.
    """

    def __init__(self, config: uvicorn.Config, application: Application, options: ServeOptions, early_stop: EarlyStopHandler) -> None:
        super().__init__(config)
        self._application = application
        self._options = options
        self._early_stop = early_stop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self._early_stop.is_stop_requested:
            self.should_exit = True
            return
        await super().startup(sockets=sockets)
        if self.should_exit or not self.servers:
            return
        gc.freeze()  # what has been imported stays: the garbage collector need not search it again and again
        port = self.servers[0].sockets[0].getsockname()[1]
        url = f"http://{_reachable(self._options.host)}:{port}"
        print_line(f"listening on {url}")
        self._application.announce(url)
        if self._options.ready_fd is not None:
            with os.fdopen(self._options.ready_fd, "w") as ready:
                ready.write(json.dumps({"url": url, "pid": os.getpid()}) + "\n")
        if self._options.parent_pid is not None:
            asyncio.get_running_loop().add_reader(sys.stdin.fileno(), self._read_standard_input)
            self._watch_parent(self._options.parent_pid)

    def _read_standard_input(self) -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
            os.kill(os.getpid(), signal.SIGTERM)

    def _watch_parent(self, parent_pid: int) -> None:
        """Stop when the parent process ends, even if one of its other children keeps the other end of standard input open."""
        try:
            parent = os.pidfd_open(parent_pid)
        except ProcessLookupError:
            parent = None
        if parent is None or os.getppid() != parent_pid:
            os.kill(os.getpid(), signal.SIGTERM)
            return
        asyncio.get_running_loop().add_reader(parent, self._parent_ended, parent)

    def _parent_ended(self, parent: int) -> None:
        asyncio.get_running_loop().remove_reader(parent)
        os.close(parent)
        os.kill(os.getpid(), signal.SIGTERM)


def _reachable(host: str) -> str:
    """The host under which clients on this machine reach a listening address."""
    if host in ("0.0.0.0", ""):
        return "127.0.0.1"
    if host == "::":
        return "[::1]"
    return f"[{host}]" if ":" in host else host


def _listen(host: str, port: int) -> socket.socket:
    """Open the listening socket. This is done before anything is started, so that an address that is not available needs no clean-up."""
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=BACKLOG)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65_535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: 0 to 65535")
    return int(text)


def serve(settings: Settings, options: ServeOptions, parts: Parts | None = None) -> int:
    """Run the service until a signal stops it.

    Args:
        settings: the settings.
        options: the options.
        parts: the parts to build the service from; default: those of production.

    Returns:
        The exit status.
    """
    # With --exit-with-parent, the parent process has created the folder for this service, and may have put the settings file there.
    if options.ephemeral and options.parent_pid is None and settings.state_dir.is_dir() and any(settings.state_dir.iterdir()):
        print(
            f"state folder {settings.state_dir}: --ephemeral removes it at the end, and it is not empty: choose another one with SANDBOX_STATE_DIR",
            file=sys.stderr,
        )
        return INVALID_SETTINGS
    early_stop = EarlyStopHandler()
    early_stop.install()
    try:
        StateDir.open(settings.state_dir).unlock()
    except StateDirError as error:
        print(error, file=sys.stderr)
        return INVALID_SETTINGS
    try:
        return _listen_and_serve(options, early_stop, parts)
    except KeyboardInterrupt:
        return 0
    finally:
        if options.ephemeral:
            shutil.rmtree(settings.state_dir, ignore_errors=True)


def _listen_and_serve(options: ServeOptions, early_stop: EarlyStopHandler, parts: Parts | None) -> int:
    try:
        listener = _listen(options.host, options.port)
    except OSError as error:
        why = (error.strerror or str(error)).partition(" (while")[0]
        print(f"cannot listen on {options.host} port {options.port}: {why}; choose another with --host and --port", file=sys.stderr)
        return NOT_STARTED
    application = Application(parts=parts, announced=True, ephemeral=options.ephemeral)
    config = uvicorn.Config(
        application,
        host=options.host,
        port=options.port,
        http="httptools",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,  # nothing here depends on the address of a client
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    server = Server(config, application, options, early_stop)
    server.run(sockets=[listener])
    return 0 if server.started or early_stop.is_stop_requested else NOT_STARTED


def print_config(settings: Settings) -> None:
    """Print every setting in force as YAML, each with a comment that says where it comes from. Tokens are not shown."""
    shown = {name: value for name, value in _plain(settings).items() if name != "sources"}
    print("\n".join(_lines(shown, settings)))


def _lines(values: Mapping[str, Any], settings: Settings, prefix: str = "", indent: str = "") -> Iterator[str]:
    for name, value in values.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict) and value and name != "env_vars":
            yield f"{indent}{name}:"
            yield from _lines(value, settings, f"{path}.", indent + "  ")
        else:
            yield f"{indent}{name}: {json.dumps(value, ensure_ascii=False)}  # {settings.source(path)}"


def _plain(value: Any) -> Any:
    if isinstance(value, Tenant):
        shown = {one.name: getattr(value, one.name) for one in dataclasses.fields(value) if one.name != "token"}
        return {**shown, "token": "(set)" if value.token else "(none)"}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {one.name: _plain(getattr(value, one.name)) for one in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {name: _plain(child) for name, child in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(child) for child in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m sandbox_server", description="A pool of isolated sandbox slots behind one HTTP service.")
    commands = parser.add_subparsers(dest="command", required=True)
    serving = commands.add_parser("serve", help="run the service until Ctrl-C or SIGTERM")
    serving.add_argument("--host", default=DEFAULT_HOST, help="the address to listen on (default %(default)s)")
    serving.add_argument("--port", type=_port, default=DEFAULT_PORT, help="the port to listen on; 0 means a free one (default %(default)s)")
    serving.add_argument(
        "--ready-fd", type=int, default=None, metavar="FD", help="write a line of JSON with the url to this file descriptor once the service listens"
    )
    serving.add_argument("--exit-with-parent", action="store_true", help="stop when the process that started this one ends, or when standard input ends")
    serving.add_argument(
        "--ephemeral", action="store_true", help="destroy every sandbox and remove the state folder at the end; the folder must be new or empty"
    )
    commands.add_parser("check-config", help="check whether the service could start with these settings")
    commands.add_parser("print-config", help="print every setting in force, and where it comes from")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None, parts: Parts | None = None) -> int:
    """Run the command that the arguments name.

    Args:
        argv: the arguments; default: those of this process.
        parts: the parts to build the service from; default: those of production.

    Returns:
        The exit status: 2 for invalid settings, 3 if the service did not start.
    """
    parent_pid = os.getppid()
    arguments = _arguments(argv)
    try:
        settings = load_settings()
        load_backends(settings, lambda name: load_backend(name, settings.state_dir, "nobody"))
    except SettingsError as error:
        print(error, file=sys.stderr)
        return INVALID_SETTINGS
    if arguments.command == "serve":
        given = {one.name: getattr(arguments, one.name) for one in dataclasses.fields(ServeOptions) if one.name != "parent_pid"}
        return serve(settings, ServeOptions(**given, parent_pid=parent_pid if arguments.exit_with_parent else None), parts)
    if arguments.command == "print-config":
        print_config(settings)
    else:
        print("the settings are good")
    return 0


if __name__ == "__main__":
    exit_status = main()
    # While it exits, the interpreter restores the default handler, with which a second SIGTERM would change the exit status.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(exit_status)
