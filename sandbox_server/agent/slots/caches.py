"""Shared caches: one folder a key, bound into the slots that were given it, invisible to all others, emptied when it grows past its quota.

Every slot has a user of its own, so what one slot writes the others could not change. The folder therefore belongs to a group that is the cache's alone:
it is set-gid, and a default access list gives the group what the creator asks for itself, whatever its umask. Where the file system takes no access
lists, the slots that have the cache run with a umask that does the same.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import os
import re
import struct
from typing import Any, Callable

from sandbox_server.agent.errors import Refused, StartFailed
from sandbox_server.agent.slots.cache_usage import Usage, measure
from sandbox_server.agent.slots.trash import Trash
from sandbox_server.agent.slots.uids import UidRange

log = logging.getLogger(__name__)

KEY = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
MAX_CACHES = 500
MEASURE_EVERY_S = 10.0
_REST_FACTOR = 10  # a measuring that took long is followed by a rest of ten times that
_GROUP_UMASK, _OWN_UMASK = 0o002, 0o022
_ACL_NAME = "system.posix_acl_default"
_ACL_VERSION, _ACL_USER, _ACL_GROUP, _ACL_OTHER = 2, 0x01, 0x04, 0x20
_ACL_NO_ID = 0xFFFFFFFF


def _group_acl() -> bytes:
    """A default access list: owner and group everything, others nothing; made with it, a file's mode is the creator's without the umask."""
    entries = ((_ACL_USER, 7), (_ACL_GROUP, 7), (_ACL_OTHER, 0))
    return struct.pack("<I", _ACL_VERSION) + b"".join(struct.pack("<HHI", tag, rights, _ACL_NO_ID) for tag, rights in entries)


class Cache:
    """One cache. `gid` None: the slots share this process's user anyway. `bodies` counts who has it mounted."""

    def __init__(self, key: str, path: str, gid: int | None) -> None:
        self.key = key
        self.path = path
        self.gid = gid
        self.umask = _OWN_UMASK
        self.bodies = 0
        self.dropped = False
        self.emptied = 0
        self.usage = Usage()

    def make(self) -> None:
        """Make the folder, empty."""
        os.makedirs(self.path, mode=0o700)
        if self.gid is None:
            return
        os.chown(self.path, -1, self.gid)
        os.chmod(self.path, 0o2770)
        try:
            os.setxattr(self.path, _ACL_NAME, _group_acl())
        except OSError as error:
            if error.errno not in (errno.ENOTSUP, errno.ENOSYS, errno.EPERM):
                raise
            self.umask = _GROUP_UMASK

    @property
    def groups(self) -> list[int]:
        """The groups that a slot with this cache is in, its own aside."""
        return [self.gid] if self.gid is not None else []


class Caches:
    """The caches of one sandbox.

    Args:
        folder: of the agent's own; slots get to what is in it only by the mounts that are made for them.
        quota_bytes: what one cache may take; over it, its content is thrown away.
        trash: where that goes.
        uids: where groups come from; None: this process is no root, and needs none.
    """

    def __init__(self, folder: str, quota_bytes: int, trash: Trash, uids: UidRange | None) -> None:
        self._folder = folder
        self._quota_bytes = quota_bytes
        self._trash = trash
        self._uids = uids
        self._caches: dict[str, Cache] = {}
        self._names = itertools.count()
        self._measuring: asyncio.Task[None] | None = None
        self._over = asyncio.Event()

    def get(self, key: Any) -> Cache:
        """The cache of a key, made if there is none.

        Raises:
            Refused: the key is not one, or there are too many.
        """
        cache = self._caches.get(check_key(key))
        if cache is None:
            if len(self._caches) >= MAX_CACHES:
                raise Refused("slot_unavailable", "this sandbox has %d caches, and no more are made" % MAX_CACHES)
            try:
                gid = self._uids.take() if self._uids is not None else None
            except StartFailed as error:
                raise Refused("slot_unavailable", "no group for the cache: %s" % error) from None
            cache = Cache(key, os.path.join(self._folder, "%d-%s" % (next(self._names), key)), gid)
            cache.make()
            self._caches[key] = cache
        if self._measuring is None:
            self._measuring = asyncio.get_event_loop().create_task(self._measure_all())
        return cache

    def mounted(self, cache: Cache) -> None:
        """A body is being started with it."""
        cache.bodies += 1

    def unmounted(self, cache: Cache) -> None:
        """A body that had it has ended."""
        cache.bodies -= 1
        self._throw_if_over(cache)

    def drop(self, key: Any, held: Callable[[Cache], list[str]]) -> None:
        """Delete a cache, behind: at once, or when the last body that still has it mounted has ended. Unknown is fine.

        Raises:
            Refused: slots hold it.
        """
        cache = self._caches.get(check_key(key))
        if cache is None:
            return
        slots = held(cache)
        if slots:
            raise Refused("invalid", "the cache %s is held by slot %s" % (cache.key, ", ".join(slots)))
        del self._caches[cache.key]
        cache.dropped = True
        self._throw_if_over(cache)

    def _throw_if_over(self, cache: Cache) -> None:
        if cache.dropped and not cache.bodies:
            self._trash.throw(cache.path)
            if self._uids is not None and cache.gid is not None:
                self._uids.give_back(cache.gid)

    def stats(self) -> list[dict[str, Any]]:
        """Every cache as it was measured last."""
        return [
            {
                "cache": cache.key,
                "bodies": cache.bodies,
                "bytes": cache.usage.size_bytes,
                "entries": cache.usage.entries,
                "emptied": cache.emptied,
                "quota_bytes": self._quota_bytes,
            }
            for cache in self._caches.values()
        ]

    async def close(self) -> None:
        """The agent ends."""
        self._over.set()
        if self._measuring is not None:
            await self._measuring

    # The quota.

    async def _measure_all(self) -> None:
        loop = asyncio.get_event_loop()
        while not self._over.is_set():
            began = loop.time()
            for cache in list(self._caches.values()):
                if cache.bodies:
                    await self._measure(cache)
            await _within(self._over, max(MEASURE_EVERY_S, _REST_FACTOR * (loop.time() - began)))

    async def _measure(self, cache: Cache) -> None:
        try:
            usage = await asyncio.get_event_loop().run_in_executor(None, measure, cache.path, self._quota_bytes, self._over.is_set)
        except OSError as error:
            log.warning("a cache could not be measured: %s", error, extra={"detail": cache.key})
            return
        cache.usage = usage
        if usage.over is not None and not cache.dropped:
            log.warning("a cache is over its quota and is emptied: %s", usage.over, extra={"detail": cache.key})
            self._empty(cache)

    def _empty(self, cache: Cache) -> None:
        """Its folder stays, because slots have it mounted; what is in it moves into the trash as it is."""
        away = "%s.emptied-%d" % (cache.path, next(self._names))
        os.mkdir(away, 0o700)
        try:
            for name in os.listdir(cache.path):
                _move(name, cache.path, away)
        except OSError as error:
            log.warning("a cache could not be emptied: %s", error, extra={"detail": cache.key})
        cache.emptied += 1
        self._trash.throw(away)


def _move(name: str, source: str, target: str) -> None:
    try:
        os.rename(os.path.join(source, name), os.path.join(target, name))
    except FileNotFoundError:
        return  # its slot was quicker
    except PermissionError:
        # Moving a folder rewrites its "..", which takes write permission on it where this process is no root.
        fd = os.open(os.path.join(source, name), os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.chmod("/proc/self/fd/%d" % fd, 0o700)
        finally:
            os.close(fd)
        os.rename(os.path.join(source, name), os.path.join(target, name))


def check_key(key: Any) -> str:
    """A cache's key, if it is one.

    Raises:
        Refused: it is not.
    """
    if not isinstance(key, str) or KEY.match(key) is None:
        raise Refused("invalid", "a cache's key is 1 to 64 letters, digits, _ or -, not %s" % ascii(key)[:100])
    return key


async def _within(event: asyncio.Event, timeout_s: float) -> None:
    """Wait for an event, not for ever."""
    try:
        await asyncio.wait_for(event.wait(), timeout_s)
    except asyncio.TimeoutError:
        return
