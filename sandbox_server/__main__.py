"""The service from the command line: serve, check-config, print-config."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import shutil
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import uvicorn
import yaml

from sandbox_server.api.tenants import Tenant
from sandbox_server.app import Application, load_backends
from sandbox_server.settings import Settings, SettingsError, load_settings
from sandbox_server.state_dir import StateDir, StateDirError

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8700
WRONG_SETTINGS = 2
NOT_STARTED = 3
KEEP_ALIVE_S = 75
"""How long an idle connection is kept, in seconds; longer than clients keep theirs, so that they close first."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """How to serve.

    Args:
        host: the address to listen on.
        port: the port to listen on; 0 takes a free one.
        ready_fd: where to write a line of JSON with the `url` once it listens.
        exit_with_parent: stop when standard input ends.
        ephemeral: remove the state folder at the end.
    """

    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    ready_fd: int | None = None
    exit_with_parent: bool = False
    ephemeral: bool = False


class Server(uvicorn.Server):
    """A server that says where it listens once it does, and may end with its parent."""

    def __init__(self, config: uvicorn.Config, application: Application, options: ServeOptions) -> None:
        super().__init__(config)
        self._application = application
        self._options = options

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.should_exit or not self.servers:
            return
        port = self.servers[0].sockets[0].getsockname()[1]
        url = f"http://{_reachable(self._options.host)}:{port}"
        print(f"listening on {url}", flush=True)
        self._application.announce(url)
        if self._options.ready_fd is not None:
            with os.fdopen(self._options.ready_fd, "w") as ready:
                ready.write(json.dumps({"url": url, "pid": os.getpid()}) + "\n")
        if self._options.exit_with_parent:
            asyncio.get_running_loop().add_reader(sys.stdin.fileno(), self._heard_from_parent)

    def _heard_from_parent(self) -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
            os.kill(os.getpid(), signal.SIGTERM)


def _reachable(host: str) -> str:
    """How this machine's clients call a listening address."""
    if host in ("0.0.0.0", ""):
        return "127.0.0.1"
    if host == "::":
        return "[::1]"
    return f"[{host}]" if ":" in host else host


def serve(settings: Settings, options: ServeOptions) -> int:
    """Serve until a signal says to stop.

    Returns:
        The exit status.
    """
    try:
        StateDir.open(settings.state_dir).close()
    except StateDirError as error:
        print(error, file=sys.stderr)
        return WRONG_SETTINGS
    application = Application(announced=True)
    config = uvicorn.Config(
        application, host=options.host, port=options.port, lifespan="on", log_config=None, access_log=False, timeout_keep_alive=KEEP_ALIVE_S
    )
    server = Server(config, application, options)
    # uvicorn raises the signals that ended it once more, when all is done: then they only mean to end this process too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        server.run()
    except KeyboardInterrupt:
        return 0
    finally:
        if options.ephemeral:
            shutil.rmtree(settings.state_dir, ignore_errors=True)
    return 0 if server.started else NOT_STARTED


def print_config(settings: Settings) -> None:
    """Print what the settings come to, as a settings file would say it, tokens aside."""
    print(yaml.safe_dump(_plain(settings), sort_keys=False, allow_unicode=True), end="")


def _plain(value: Any) -> Any:
    if isinstance(value, Tenant):
        shown = {name: child for name, child in dataclasses.asdict(value).items() if name != "token"}
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
    serving.add_argument("--port", type=int, default=DEFAULT_PORT, help="the port to listen on; 0 takes a free one (default %(default)s)")
    serving.add_argument("--ready-fd", type=int, default=None, metavar="FD", help="write a line of JSON with the url there once it listens")
    serving.add_argument("--exit-with-parent", action="store_true", help="stop when standard input ends")
    serving.add_argument("--ephemeral", action="store_true", help="remove the state folder at the end")
    commands.add_parser("check-config", help="say whether the service could start with these settings")
    commands.add_parser("print-config", help="print every setting as it is in force")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        The exit status: 2 for settings that cannot be.
    """
    arguments = _arguments(argv)
    try:
        settings = load_settings()
        load_backends(settings, settings.state_dir, "nobody")
    except SettingsError as error:
        print(error, file=sys.stderr)
        return WRONG_SETTINGS
    if arguments.command == "serve":
        given = {one.name: getattr(arguments, one.name) for one in dataclasses.fields(ServeOptions)}
        return serve(settings, ServeOptions(**given))
    if arguments.command == "print-config":
        print_config(settings)
    else:
        print("the settings are good")
    return 0


if __name__ == "__main__":
    sys.exit(main())
