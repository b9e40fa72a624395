"""Where the agent listens: always on a unix socket, and on a TCP port with TLS where it is told to. Relays come in by the unix socket."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat

from sandbox_server.agent.config import Listen
from sandbox_server.agent.server.connections import Connection, Server
from sandbox_server.agent.server.tls_listener import TlsListener

#: In the agent's own folder, for who started it: where it listens, as `{"tls": [ADDRESS, PORT]}`.
LISTENING_FILE = "listening.json"
_BACKLOG = 128


class Listeners:
    """All of the agent's listening sockets.

    Args:
        server: what a connection needs of the agent.
        listen: where.
        folder: the agent's own.
    """

    def __init__(self, server: Server, listen: Listen, folder: str) -> None:
        self._server = server
        self._listen = listen
        self._folder = folder
        self._unix: asyncio.AbstractServer | None = None
        self._tls: TlsListener | None = None

    async def start(self) -> None:
        """Listen everywhere. The unix socket comes last: once it is there, everything is.

        Raises:
            OSError: an address cannot be had, or the certificate and key do not fit.
        """
        if self._listen.tls is not None:
            self._tls = TlsListener(self._server, self._listen.tls, self._folder)
            self._write_down({"tls": self._tls.start()})
        await self._start_unix(self._listen.unix)

    def _write_down(self, where: object) -> None:
        path = os.path.join(self._folder, LISTENING_FILE)
        with open(path + ".new", "w", encoding="utf-8") as file:
            json.dump(where, file)
        os.rename(path + ".new", path)

    async def _start_unix(self, path: str) -> None:
        if os.path.lexists(path) and not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise OSError("%s exists and is no socket" % path)
        # Renamed into place once it listens: whoever sees the socket can connect to it.
        temporary = "%s.%d" % (path, os.getpid())
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(temporary)  # the process's umask leaves it to this user alone
        sock.listen(_BACKLOG)
        os.rename(temporary, path)
        sock.setblocking(False)
        self._unix = await asyncio.get_event_loop().create_unix_server(lambda: Connection(self._server), sock=sock)

    def close(self) -> None:
        """Listen no more; connections that are there go on."""
        if self._unix is not None:
            self._unix.close()
        if self._tls is not None:
            self._tls.close()
