"""Slots as users of their own: root starts each slot's init, which stays privileged and out of reach; everything it starts has the slot's uid.

Other slots' files cannot be read (0700 folders) and their processes not be signalled, but both can be seen. `/tmp`, `/dev/shm` and IPC are the slot's own
where init may make namespaces. Elsewhere they are shared places: what the uid owns there is removed when the slot ends, and its absence is the proof. There
are no shared caches: a slot could keep a hard link to what is in one, and with it a way to others that no narrowing takes away.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import shutil
import stat
from typing import Any, Collection

from sandbox_server.agent.errors import StartFailed
from sandbox_server.agent.execution.slot_runtime import CacheFolder, SlotRuntime
from sandbox_server.agent.init.private_mounts import FAILURE_PREFIX
from sandbox_server.agent.isolation import base
from sandbox_server.agent.isolation.shared_places import SHARED_PLACES, list_abandoned_bins, remove_owned
from sandbox_server.agent.isolation.starter import Starter
from sandbox_server.agent.isolation.sweep import BIN_PREFIX, Sweep
from sandbox_server.agent.kernel.cgroups import Cgroups
from sandbox_server.agent.kernel.trash import Trash
from sandbox_server.agent.kernel.uids import UidRange, keeper_of, kill_uid

log = logging.getLogger(__name__)


class Uid:
    """The mode `uid`."""

    name = "uid"
    networks: tuple[str, ...] = ("shared",)
    caches = False

    def __init__(self, context: base.Context, cgroups: Cgroups, uids: UidRange, trash: Trash) -> None:
        self._context = context
        self._uids = uids
        self._trash = trash
        self._top = os.path.join(context.config.workspace_base, context.config.sandbox_id)
        self._lib = os.path.join(self._top, "lib")
        # Init's code lies beside the slots' folders: what is in the machine's /tmp is out of the sight of an init that has its own.
        self._starter = Starter(dataclasses.replace(context, lib_dir=self._lib), cgroups, self._top)
        self._made: list[str] = []
        self._range = range(0)
        self._proven = False
        hindrance = self._hindrance()
        self.places = "own" if hindrance is None else "shared: %s" % hindrance

    async def start(self, slot_id: str, network: bool, keep: SlotRuntime | None = None, cache: CacheFolder | None = None) -> SlotRuntime:
        """See `Isolation.start`."""
        if os.geteuid() != 0:
            raise StartFailed("needs root, to give every slot a user of its own")
        if not network:
            raise StartFailed("cannot keep a slot from the network")
        if cache is not None:
            raise StartFailed("cannot take a cache away again")
        await self._set_up()
        uid = keep.uid if keep is not None and keep.uid is not None else self._uids.take()
        try:
            body = await self._start(slot_id, network, uid, keep)
        except BaseException:
            if keep is None:
                self._uids.give_back(uid)
            raise
        os.chown(body.dirs.root, uid, uid)
        return body

    async def _start(self, slot_id: str, network: bool, uid: int, keep: SlotRuntime | None) -> SlotRuntime:
        if self.places == "own":
            try:
                body = await self._starter.start("uid", slot_id, network, uid, keep, own=True)
            except StartFailed as error:
                if self._proven or FAILURE_PREFIX not in str(error):
                    raise
                self.places = "shared: %s" % error  # it is the first one that shows whether it is allowed here
            else:
                self._proven = True
                return body
        return await self._starter.start("uid", slot_id, network, uid, keep)

    def _hindrance(self) -> str | None:
        """What slots and their inits need must not lie in a place that is hidden from them. None, or what does."""
        needed = {"workspace_base": self._top, "the interpreter": base.interpreter(), "its library": os.path.realpath(os.__file__)}
        for name, path in needed.items():
            for place in SHARED_PLACES:
                if (os.path.realpath(path) + "/").startswith(os.path.realpath(place) + "/"):
                    return "%s lies in %s" % (name, place)
        return None

    async def _set_up(self) -> None:
        """Before the first slot: what an agent that was killed has left of these users goes."""
        self._open_top()
        if not self._range:
            uids = self._uids.lock()
            self._trash.throw(self._lib)
            shutil.copytree(self._context.lib_dir, self._lib)
            for left in list_abandoned_bins(self._bins(uids)):
                self._trash.throw(left)
            await self._sweep(uids, uids)
            self._range = uids

    @staticmethod
    def _bins(uids: range) -> str:
        return "%s%d-" % (BIN_PREFIX, uids.start)

    async def _sweep(self, owners: Collection[int], slots: range) -> Sweep:
        sweep = await asyncio.get_running_loop().run_in_executor(None, remove_owned, owners, slots, self._bins(slots), (self._top,))
        for folder in sweep.bins:
            self._trash.throw(folder)
        if sweep.unswept:
            log.warning("folders of others could not be searched for leftovers: %s", "; ".join(sweep.unswept))
        return sweep

    def _open_top(self) -> None:
        """The folders above must let a slot pass, and nothing more. Each must be root's, or a slot could exchange it."""
        for folder in (self._context.config.workspace_base, self._top):
            if not os.path.isdir(folder):
                os.makedirs(folder)
                os.chmod(folder, 0o711)
                self._made.insert(0, folder)
        path = self._top
        while True:
            info = os.lstat(path)
            if not stat.S_ISDIR(info.st_mode) or info.st_uid != 0 or (info.st_mode & 0o022 and not info.st_mode & stat.S_ISVTX):
                raise StartFailed("%s is not a folder of root alone" % path)
            if not info.st_mode & 0o001:
                raise StartFailed("a slot's user cannot pass %s (mode %o); set workspace_base to a folder it can" % (path, info.st_mode & 0o7777))
            if path == "/":
                return
            path = os.path.dirname(path)

    async def end(self, body: SlotRuntime) -> dict[str, Any]:
        """See `Isolation.end`."""
        uid = body.uid
        if uid is None:
            raise ValueError("a body of the mode uid has a uid")
        body.link.close()
        loop = asyncio.get_running_loop()
        # Init ends its own when its socket closes; it may be slow, or stopped: this does not rely on it.
        ended = await base.wait_exit(body.process, base.END_TIMEOUT_S)
        if not ended:
            body.process.kill()
            ended = await base.wait_exit(body.process, base.END_TIMEOUT_S)
        living = await loop.run_in_executor(None, kill_uid, uid)
        proof: dict[str, Any] = {"init_ended": ended, "processes": len(living), "clean": ended and not living, "places": self.places}
        if not proof["clean"]:
            proof["detail"] = "uid %d still has %d processes" % (uid, len(living))
        elif self.places != "own":  # its own have gone with its last process
            left = await self._sweep((uid, keeper_of(uid)), self._range)
            proof.update(leftovers_removed=left.removed, unswept=len(left.unswept))
            if left.errors:
                proof.update(clean=False, detail="what uid %d left could not be removed: %s" % (uid, left.errors[0]))
        if proof["clean"]:
            base.close_body_fds(body)
            body.groups.remove()
        return proof

    def forget(self, body: SlotRuntime) -> None:
        """See `Isolation.forget`."""
        if body.uid is not None:
            self._uids.give_back(body.uid)

    def close(self) -> None:
        """See `Isolation.close`."""
        self._trash.throw(self._lib)
        self._range = range(0)
        while self._made:
            folder = self._made.pop(0)
            try:
                os.rmdir(folder)
            except OSError as error:
                log.info("a folder stays: %s", error)  # another agent uses it, or a quarantined slot is in it
                return
