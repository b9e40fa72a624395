"""Keeps which isolation modes were proven to work, for the other agents of root on this machine, until the machine is started again.

A record is a file in a folder that only root can change. It contains all the facts under which the mode was proven, and it is believed only if they are exactly
those of the agent that reads it. That a mode does not work is never kept. An agent that is not root keeps and believes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import logging
import os
import stat
from typing import Any, AsyncIterator, Mapping

from sandbox_server.agent.errors import StartFailed
from sandbox_server.agent.kernel.uids import find_run_folder

log = logging.getLogger(__name__)

FOLDER = "sandbox-pool-probes"
#: How long an agent waits for another one that probes the same mode under the same facts, in seconds. Then it probes as well.
WAIT_S = 3.0
_WAIT_STEP_S = 0.005
_MAX_RECORDS = 64
_MAX_BYTES = 1 << 20
_VERSION = 1


@dataclasses.dataclass(frozen=True)
class FoundRecord:
    """A file that may be a record.

    Args:
        mode: its type and permissions.
        uid: its owner.
        links: how many names it has.
        content: what it contains.
    """

    mode: int
    uid: int
    links: int
    content: bytes


def make_content(isolation: str, facts: Mapping[str, Any]) -> bytes:
    """Return the content of the record that an isolation mode works under these facts."""
    return json.dumps({"version": _VERSION, "works": isolation, "facts": facts}, sort_keys=True).encode("ascii")


def may_be_reused(found: FoundRecord, expected: bytes, own_uid: int) -> bool:
    """Return whether a file proves what the expected content says: it is a file of this user alone, and was written under exactly these facts.

    Args:
        found: the file.
        expected: see `make_content`.
        own_uid: the user of this agent.
    """
    is_own_file = stat.S_ISREG(found.mode) and stat.S_IMODE(found.mode) == 0o600 and found.uid == own_uid and found.links == 1
    return is_own_file and found.content == expected


class ModeRecord:
    """The record of one mode, which this agent has locked.

    Args:
        fd: the descriptor of its file; -1 if nothing is kept.
        expected: see `make_content`.
    """

    def __init__(self, fd: int, expected: bytes) -> None:
        self._fd = fd
        self._expected = expected

    def proves_mode(self) -> bool:
        """Return whether the mode was proven to work under the facts of this agent."""
        if self._fd < 0:
            return False
        info = os.fstat(self._fd)
        return may_be_reused(FoundRecord(info.st_mode, info.st_uid, info.st_nlink, os.pread(self._fd, _MAX_BYTES, 0)), self._expected, os.geteuid())

    def keep_proof(self) -> None:
        """Record that the mode works. If that fails, on a full file system for example, nothing is recorded: an incomplete record is not believed."""
        if self._fd < 0:
            return
        try:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, self._expected, 0)
        except OSError as error:
            log.info("what works on this machine is not recorded: %s", error)


class ProbeRecords:
    """The records that agents with these facts can use.

    Args:
        folder: the folder of records, which only this user can change; None to keep and believe nothing.
        facts: see `facts.collect_facts`.
    """

    def __init__(self, folder: str | None, facts: Mapping[str, Any]) -> None:
        self._folder = folder
        self._facts = facts

    @contextlib.asynccontextmanager
    async def open_record(self, isolation: str) -> AsyncIterator[ModeRecord]:
        """Lock the record of a mode, so that of several agents that start together one probes the mode and the others wait for its result.

        Args:
            isolation: the mode.
        """
        expected = make_content(isolation, self._facts)
        fd = -1
        if self._folder is not None:
            fd = await _lock_file(self._folder, "%s-%s" % (isolation, hashlib.sha256(expected).hexdigest()[:32]))
        try:
            yield ModeRecord(fd, expected)
        finally:
            if fd >= 0:
                os.close(fd)


def find_records(facts: Mapping[str, Any] | None) -> ProbeRecords:
    """Return the records of this machine. If this agent is not root, has no facts or has no folder for them, nothing is kept and believed.

    Args:
        facts: see `facts.collect_facts`.
    """
    if facts is None or os.geteuid() != 0:
        return ProbeRecords(None, {})
    try:
        folder = find_run_folder(FOLDER)
        _remove_old_records(folder)
    except (OSError, StartFailed) as error:
        log.info("what works on this machine is not recorded: %s", error)
        return ProbeRecords(None, {})
    return ProbeRecords(folder, facts)


async def _lock_file(folder: str, name: str) -> int:
    """Open and lock a file in the folder of records. Returns its descriptor; -1 if it cannot be opened, or another agent keeps the lock for too long."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + WAIT_S
    try:
        fd = os.open(os.path.join(folder, name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        log.info("what works on this machine is not recorded: %s", error)
        return -1
    try:
        while loop.time() <= deadline:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                await asyncio.sleep(_WAIT_STEP_S)
            else:
                return fd
    except BaseException:  # also when this task is cancelled
        os.close(fd)
        raise
    os.close(fd)
    return -1


def _remove_old_records(folder: str) -> None:
    """Remove the oldest records if there are many, because nobody asks again for facts that have changed."""
    names = os.listdir(folder)
    if len(names) <= _MAX_RECORDS:
        return
    paths = sorted((os.path.join(folder, name) for name in names), key=lambda path: os.lstat(path).st_mtime_ns)
    for path in paths[: len(paths) - _MAX_RECORDS // 2]:
        with contextlib.suppress(FileNotFoundError):  # Another agent removes old records as well.
            os.unlink(path)
