"""The sockets on which the agent listens: always a unix socket, and a TCP port with TLS if the configuration has one. A relay connects to the unix socket."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat

from sandbox_server.agent.config import Listen
from sandbox_server.agent.server.connections import AgentServer, ServiceConnection
from sandbox_server.agent.server.tls_listener import BACKLOG, TlsListener

#: A file in the agent's own folder that tells the backend where the agent listens, as `{"tls": [ADDRESS, PORT]}`.
LISTENING_FILE = "listening.json"


class Listeners:
    """All listening sockets of the agent.

    Args:
        server: the agent.
        listen: where to listen.
        folder: the agent's own folder.
    """

    def __init__(self, server: AgentServer, listen: Listen, folder: str) -> None:
        self._server = server
        self._listen = listen
        self._folder = folder
        self._unix: asyncio.AbstractServer | None = None
        self._tls: TlsListener | None = None

    async def start_listening(self) -> None:
        """Listen on all sockets. The unix socket comes last, so that its existence shows that the agent is ready.

        Raises:
            OSError: an address cannot be used, or the certificate and the key do not belong together.
        """
        if self._listen.tls is not None:
            self._tls = TlsListener(self._server, self._listen.tls, self._folder)
            self._write_addresses({"tls": self._tls.start_listening()})
        await self._start_unix(self._listen.unix)

    def _write_addresses(self, addresses: object) -> None:
        path = os.path.join(self._folder, LISTENING_FILE)
        with open(path + ".new", "w", encoding="utf-8") as file:
            json.dump(addresses, file)
        os.rename(path + ".new", path)

    async def _start_unix(self, path: str) -> None:
        if os.path.lexists(path) and not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise OSError("%s exists and is no socket" % path)
        # The socket gets its final name after it listens, so that every process that sees it can connect.
        temporary = "%s.%d" % (path, os.getpid())
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(temporary)  # the process's umask leaves it to this user alone
        sock.listen(BACKLOG)
        os.rename(temporary, path)
        sock.setblocking(False)
        self._unix = await asyncio.get_event_loop().create_unix_server(lambda: ServiceConnection(self._server), sock=sock)

    def stop_listening(self) -> None:
        """Close the listening sockets. Existing connections continue."""
        if self._unix is not None:
            self._unix.close()
        if self._tls is not None:
            self._tls.stop_listening()
