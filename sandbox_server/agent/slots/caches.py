"""Shared caches: one folder per key. A slot that was given the cache has the folder mounted; no other slot can see it.

Every slot runs as a user of its own, so one slot could not change what another has written. The folder of a cache therefore belongs to a group that only
this cache has. The folder is set-gid, and its default access control list (ACL) gives the group the same rights as the user, whatever the umask. On a file
system without ACLs, the slots that have the cache run with a umask that has the same effect.

A cache that grows past its quota is emptied.
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import itertools
import logging
import os
import re
import struct
from typing import Any, Callable

from sandbox_server.agent.errors import Refused, StartFailed
from sandbox_server.agent.execution.slot_runtime import CacheFolder
from sandbox_server.agent.kernel.measuring import pause_after_measurement_s
from sandbox_server.agent.kernel.trash import Trash
from sandbox_server.agent.kernel.uids import UidRange
from sandbox_server.agent.slots.cache_usage import CacheUsage, measure_cache

log = logging.getLogger(__name__)

KEY = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
MAX_CACHES = 500
_GROUP_UMASK, _OWN_UMASK = 0o002, 0o022
_ACL_NAME = "system.posix_acl_default"
_ACL_VERSION, _ACL_USER, _ACL_GROUP, _ACL_OTHER = 2, 0x01, 0x04, 0x20
_ACL_NO_ID = 0xFFFFFFFF


def _group_acl() -> bytes:
    """The default ACL: all rights for user and group, none for others. With a default ACL, the kernel ignores the umask."""
    entries = ((_ACL_USER, 7), (_ACL_GROUP, 7), (_ACL_OTHER, 0))
    return struct.pack("<I", _ACL_VERSION) + b"".join(struct.pack("<HHI", tag, rights, _ACL_NO_ID) for tag, rights in entries)


@dataclasses.dataclass
class _CacheState:
    """One cache: its folder, and what is known of it. `runtime_count`: how many slot runtimes have it mounted."""

    folder: CacheFolder
    runtime_count: int = 0
    is_dropped: bool = False
    emptied_count: int = 0
    usage: CacheUsage = dataclasses.field(default_factory=CacheUsage)


def _make_folder(key: str, path: str, gid: int | None) -> CacheFolder:
    """Make the empty folder of a cache.

    Raises:
        OSError: the folder cannot be made.
    """
    os.makedirs(path, mode=0o700)
    if gid is None:
        return CacheFolder(key, path, None, _OWN_UMASK)
    os.chown(path, -1, gid)
    os.chmod(path, 0o2770)
    try:
        os.setxattr(path, _ACL_NAME, _group_acl())
    except OSError as error:
        if error.errno not in (errno.ENOTSUP, errno.ENOSYS, errno.EPERM):
            raise
        return CacheFolder(key, path, gid, _GROUP_UMASK)
    return CacheFolder(key, path, gid, _OWN_UMASK)


class Caches:
    """The shared caches of one sandbox.

    Args:
        folder: a folder of the agent's own. Slots reach the caches in it only through the mounts that are made for them.
        quota_bytes: the size of one cache above which its content is deleted.
        measure_every_s: how long to wait, at least, between two measurements of the caches, in seconds.
        trash: deletes that content.
        uids: gives each cache a group. None: the agent does not run as root, and its slots need no group.
    """

    def __init__(self, folder: str, quota_bytes: int, measure_every_s: float, trash: Trash, uids: UidRange | None) -> None:
        self._folder = folder
        self._quota_bytes = quota_bytes
        self._measure_every_s = measure_every_s
        self._trash = trash
        self._uids = uids
        self._by_key: dict[str, _CacheState] = {}
        self._by_path: dict[str, _CacheState] = {}  # also the dropped caches that a slot runtime still has mounted
        self._names = itertools.count()
        self._measuring: asyncio.Task[None] | None = None
        self._is_closed = asyncio.Event()

    def get_cache(self, key: Any) -> CacheFolder:
        """Return the cache with this key; make it if there is none.

        Raises:
            Refused: the key is not valid, or the sandbox has as many caches as it may have.
        """
        state = self._by_key.get(check_cache_key(key))
        if state is None:
            state = self._make_cache(key)
        if self._measuring is None:
            self._measuring = asyncio.get_event_loop().create_task(self._measure_all())
        return state.folder

    def _make_cache(self, key: str) -> _CacheState:
        if len(self._by_key) >= MAX_CACHES:
            raise Refused("slot_unavailable", "this sandbox has %d caches, which is the most it may have" % MAX_CACHES)
        try:
            gid = self._uids.take_uid() if self._uids is not None else None
        except StartFailed as error:
            raise Refused("slot_unavailable", "there is no group for the cache: %s" % error) from None
        folder = _make_folder(key, os.path.join(self._folder, "%d-%s" % (next(self._names), key)), gid)
        state = self._by_key[key] = self._by_path[folder.path] = _CacheState(folder)
        return state

    def count_mount(self, cache: CacheFolder) -> None:
        """Count a slot runtime that is about to mount the cache."""
        self._by_path[cache.path].runtime_count += 1

    def count_unmount(self, cache: CacheFolder) -> None:
        """Count off a slot runtime that had mounted the cache. A dropped cache is deleted with the last of them."""
        state = self._by_path[cache.path]
        state.runtime_count -= 1
        self._delete_if_unused(state)

    def drop_cache(self, key: Any, slots_holding: Callable[[CacheFolder], list[str]]) -> None:
        """Delete a cache: now, or once the last slot runtime that has it mounted has ended. An unknown key is no error.

        Args:
            key: the key of the cache.
            slots_holding: returns the ids of the slots that hold a cache now.

        Raises:
            Refused: a slot holds the cache, or the key is not valid.
        """
        state = self._by_key.get(check_cache_key(key))
        if state is None:
            return
        slot_ids = slots_holding(state.folder)
        if slot_ids:
            raise Refused("invalid", "the cache %s is held by slot %s" % (state.folder.key, ", ".join(slot_ids)))
        del self._by_key[state.folder.key]
        state.is_dropped = True
        self._delete_if_unused(state)

    def _delete_if_unused(self, state: _CacheState) -> None:
        if not state.is_dropped or state.runtime_count:
            return
        del self._by_path[state.folder.path]
        self._trash.discard_folder(state.folder.path)
        if self._uids is not None and state.folder.gid is not None:
            self._uids.give_back_uid(state.folder.gid)

    def describe_caches(self) -> list[dict[str, Any]]:
        """Describe every cache as it was last measured."""
        return [
            {
                "cache": state.folder.key,
                "bodies": state.runtime_count,
                "bytes": state.usage.size_bytes,
                "entries": state.usage.entries,
                "emptied": state.emptied_count,
                "quota_bytes": self._quota_bytes,
            }
            for state in self._by_key.values()
        ]

    async def close_caches(self) -> None:
        """Stop measuring."""
        self._is_closed.set()
        if self._measuring is not None:
            await self._measuring

    # The quota.

    async def _measure_all(self) -> None:
        loop = asyncio.get_event_loop()
        while not self._is_closed.is_set():
            began = loop.time()
            for state in list(self._by_key.values()):
                if state.runtime_count:
                    await self._measure_cache(state)
            await _wait_at_most(self._is_closed, pause_after_measurement_s(loop.time() - began, self._measure_every_s))

    async def _measure_cache(self, state: _CacheState) -> None:
        key = state.folder.key
        try:
            usage = await asyncio.get_event_loop().run_in_executor(None, measure_cache, state.folder.path, self._quota_bytes, self._is_closed.is_set)
        except OSError as error:
            log.warning("a cache could not be measured: %s", error, extra={"detail": key})
            return
        state.usage = usage
        if usage.excess is not None and not state.is_dropped:
            log.warning("a cache is over its quota, and its content is deleted: %s", usage.excess, extra={"detail": key})
            self._empty_cache(state)

    def _empty_cache(self, state: _CacheState) -> None:
        """Move the content of a cache into the trash. The folder itself stays, because slots have it mounted."""
        path = state.folder.path
        removed = "%s.emptied-%d" % (path, next(self._names))
        os.mkdir(removed, 0o700)
        try:
            for name in os.listdir(path):
                _move_entry(name, path, removed)
        except OSError as error:
            log.warning("a cache could not be emptied: %s", error, extra={"detail": state.folder.key})
        state.emptied_count += 1
        self._trash.discard_folder(removed)


def _move_entry(name: str, source: str, target: str) -> None:
    try:
        os.rename(os.path.join(source, name), os.path.join(target, name))
    except FileNotFoundError:
        return  # a slot has removed it in the meantime
    except PermissionError:
        # Moving a folder rewrites its "..". An agent that is not root needs write permission on the folder for that.
        fd = os.open(os.path.join(source, name), os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.chmod("/proc/self/fd/%d" % fd, 0o700)
        finally:
            os.close(fd)
        os.rename(os.path.join(source, name), os.path.join(target, name))


def check_cache_key(key: Any) -> str:
    """Return `key` if it is a valid key of a cache.

    Raises:
        Refused: it is not.
    """
    if not isinstance(key, str) or KEY.match(key) is None:
        raise Refused("invalid", "a cache's key is 1 to 64 letters, digits, _ or -, not %s" % ascii(key)[:100])
    return key


async def _wait_at_most(event: asyncio.Event, timeout_s: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), timeout_s)
    except asyncio.TimeoutError:
        return
