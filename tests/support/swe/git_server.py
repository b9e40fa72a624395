"""A Git server on this machine: one that sends single commits (`git http-backend`), and one of plain files, which cannot."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit


class SmartGit(BaseHTTPRequestHandler):
    """Answers with the program `git http-backend`."""

    root: Path
    requests: list[str]

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        address = urlsplit(self.path)
        self.requests.append(f"{self.command} {self.path}")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        env = {
            **os.environ, "GIT_PROJECT_ROOT": str(self.root), "GIT_HTTP_EXPORT_ALL": "1", "PATH_INFO": address.path, "QUERY_STRING": address.query,
            "REQUEST_METHOD": self.command, "CONTENT_TYPE": self.headers.get("Content-Type") or "", "GIT_PROTOCOL": self.headers.get("Git-Protocol") or "",
            "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding") or "", "CONTENT_LENGTH": str(len(body)), "REMOTE_ADDR": "127.0.0.1",
            "GIT_CONFIG_GLOBAL": os.devnull,
        }  # fmt: skip
        answer = subprocess.run(["git", "http-backend"], input=body, env=env, capture_output=True, check=False).stdout
        head, _, content = answer.partition(b"\r\n\r\n")
        headers = [line.split(": ", 1) for line in head.decode().split("\r\n")]
        self.send_response(next((int(value.split()[0]) for name, value in headers if name == "Status"), 200))
        for name, value in headers:
            if name != "Status":
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing."""


class PlainFiles(SimpleHTTPRequestHandler):
    """Answers with files."""

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing."""


@contextlib.contextmanager
def git_server(root: Path, *, smart: bool) -> Iterator[tuple[str, list[str]]]:
    """Serve the repositories below a folder. Yields the address, and a list to which a smart server adds its requests."""
    requests: list[str] = []
    handler = type("Handler", (SmartGit,), {"root": root, "requests": requests}) if smart else partial(PlainFiles, directory=str(root))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
