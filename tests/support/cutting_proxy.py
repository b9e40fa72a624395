"""A proxy between client and service that cuts connections, as proxies in front of a cluster do."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

CHUNK_BYTES = 65536


@dataclass
class CuttingProxy:
    """Forwards bytes. Each connection is cut after the service has sent the next number of bytes in the list; None never cuts it.

    Args:
        service_url: where to.
        cuts: after how many bytes of answers each further connection is cut; 0 cuts when the service's answer begins, so that the request was served.
    """

    service_url: str
    cuts: list[int | None]
    cut_count: int = 0
    url: str = ""
    _threads: list[threading.Thread] = field(default_factory=list)

    @contextmanager
    def running(self) -> Iterator[CuttingProxy]:
        """Listen for the duration of the block."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            accepting = threading.Thread(target=self._accept, args=(listener,))
            accepting.start()
            try:
                yield self
            finally:
                listener.shutdown(socket.SHUT_RDWR)
                accepting.join()
                for thread in self._threads:
                    thread.join()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:  # the proxy was closed
                return
            allowed = self.cuts.pop(0) if self.cuts else None
            thread = threading.Thread(target=self._serve, args=(client, allowed))
            thread.start()
            self._threads.append(thread)

    def _serve(self, client: socket.socket, allowed: int | None) -> None:
        target = urlsplit(self.service_url)
        assert target.hostname is not None
        with client, ExitStack() as stack:
            try:
                service = stack.enter_context(socket.create_connection((target.hostname, target.port or 80)))
            except ConnectionRefusedError:
                return  # the service does not run now
            there = threading.Thread(target=_pass_on, args=(client, service))
            there.start()
            while chunk := _received(service):
                if allowed is not None and len(chunk) >= allowed:
                    self.cut_count += 1
                    _sent(client, chunk[:allowed])
                    break
                if allowed is not None:
                    allowed -= len(chunk)
                if not _sent(client, chunk):
                    break
            for end in (client, service):
                _shut(end)
            there.join()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    while chunk := _received(source):
        if not _sent(target, chunk):
            break
    _shut(target)


def _received(source: socket.socket) -> bytes:
    try:
        return source.recv(CHUNK_BYTES)
    except OSError:  # the other direction was cut
        return b""


def _sent(target: socket.socket, chunk: bytes) -> bool:
    try:
        target.sendall(chunk)
    except OSError:  # the other direction was cut
        return False
    return True


def _shut(end: socket.socket) -> None:
    with suppress(OSError):  # it may be closed already
        end.shutdown(socket.SHUT_RDWR)
