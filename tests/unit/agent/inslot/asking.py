"""Running one slot-side operation the way init does: in a forked child, answered through a pipe, possibly as another user."""

from __future__ import annotations

import json
import os
import resource
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandbox_server.agent.inslot import child

NOBODY = 65534
# Folders so deep and with names so long that a path to the last one is longer than a path may be (4,096 bytes), and that neither a recursion nor an open
# descriptor for each of them is possible.
DEPTH = 1100
NAME = "deep"


@dataclass(frozen=True)
class Answer:
    """What came out of the pipe, and how the child ended."""

    header: Mapping[str, Any]
    body: bytes
    status: int

    @property
    def text(self) -> str:
        assert self.header["ok"], self.header
        return self.body.decode()

    @property
    def refused(self) -> tuple[str, str | None]:
        """Code and errno of a refusal."""
        assert not self.header["ok"], self.header
        assert self.status == 0
        assert self.body == b""
        return self.header["code"], self.header.get("errno")

    @property
    def detail(self) -> str:
        assert not self.header["ok"], self.header
        return str(self.header["detail"])


def allow_few_descriptors() -> None:
    """Allow this process a few more descriptors than it has inherited."""
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 25, highest + 25))


class Slot:
    """A slot's two folders, and operations asked for in it.

    Args:
        base: an empty folder.
        uid: the user the operations run as; None: who runs the tests.
    """

    def __init__(self, base: Path, uid: int | None = None) -> None:
        self.workspace = base / "workspace"
        self.tmp = base / "tmp"
        self.outside = base / "outside"
        self.uid = uid
        base.chmod(0o755)
        for folder in (self.workspace, self.tmp, self.outside):
            folder.mkdir()
            if uid is not None:
                os.chown(folder, uid, uid)

    @property
    def ctx(self) -> dict[str, Any]:
        return {"workspace": str(self.workspace), "home": str(self.workspace), "roots": [str(self.workspace), str(self.tmp)]}

    def ask(self, op: str, data: bytes | None = None, before: Callable[[], None] | None = None, **args: Any) -> Answer:
        """Run the operation to its end.

        Args:
            op: its name.
            data: what a put is fed.
            before: called in the child first.
            args: its arguments.
        """
        out_r, out_w = os.pipe()
        in_r, in_w = os.pipe()
        pid = os.fork()
        if pid == 0:
            self._child(op, args, before, (out_r, out_w, in_r, in_w))
        os.close(out_w)
        os.close(in_r)
        feeder = threading.Thread(target=_feed, args=(in_w, data or b""))
        feeder.start()
        with open(out_r, "rb") as file:
            answer = file.read()
        feeder.join()
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        length = int.from_bytes(answer[:4], "big")
        return Answer(json.loads(answer[4 : 4 + length]), answer[4 + length :], status)

    def _child(self, op: str, args: dict[str, Any], before: Callable[[], None] | None, pipes: tuple[int, int, int, int]) -> None:
        status = 125
        try:
            out_r, out_w, in_r, in_w = pipes
            os.close(out_r)
            os.close(in_w)
            child.import_operation(op)
            if before is not None:
                before()
            if self.uid is not None:
                os.setgroups([])
                os.setresgid(self.uid, self.uid, self.uid)
                os.setresuid(self.uid, self.uid, self.uid)
            try:
                child.run_operation(op, args, self.ctx, out_w, in_r)
                status = 0
            except SystemExit as end:
                status = int(str(end.code))
        finally:
            os._exit(status)


def _feed(fd: int, data: bytes) -> None:
    with open(fd, "wb", buffering=0) as file:
        view = memoryview(data)
        try:
            while view:
                view = view[file.write(view) :]
        except BrokenPipeError:
            pass  # refused before it was all read


def limit_memory(more_bytes: int) -> None:
    """Let this process take at most so much memory more. A fixed limit would count what the process of the tests has taken before it forked."""
    with open("/proc/self/status", encoding="ascii") as file:
        (data_kib,) = (int(line.split()[1]) for line in file if line.startswith("VmData:"))
    limit = (data_kib << 10) + more_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def names_below(folder: Path) -> list[str]:
    """Every path below a folder, relative to it, in order."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def make_deep(folder: Path, name: str = NAME) -> None:
    """A chain of `DEPTH` folders of one name, with a file `leaf` in the last."""
    fd = os.open(folder, os.O_RDONLY)
    for _ in range(DEPTH):
        os.mkdir(name, dir_fd=fd)
        below = os.open(name, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    leaf = os.open("leaf", os.O_WRONLY | os.O_CREAT, dir_fd=fd)
    os.write(leaf, b"needle\n")
    os.close(leaf)
    os.close(fd)
