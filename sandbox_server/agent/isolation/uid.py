"""Slots as users of their own: root starts each slot's init, which stays privileged and out of reach; everything it starts has the slot's uid.

Other slots' files cannot be read (0700 folders) and their processes not be signalled, but both can be seen. `/tmp`, `/dev/shm` and IPC are shared
places: what the uid owns there is removed when the slot ends, and its absence is the proof.
"""

from __future__ import annotations

import asyncio
import logging
import os
import stat
from typing import Any

from sandbox_server.agent.cgroups import Cgroups
from sandbox_server.agent.errors import StartFailed
from sandbox_server.agent.isolation import base
from sandbox_server.agent.isolation.leftovers import remove_owned
from sandbox_server.agent.isolation.shared import Starter
from sandbox_server.agent.uids import UidRange, kill_uid

log = logging.getLogger(__name__)


class Uid:
    """The mode `uid`."""

    name = "uid"
    networks: tuple[str, ...] = ("shared",)

    def __init__(self, context: base.Context, cgroups: Cgroups, uids: UidRange) -> None:
        self._context = context
        self._uids = uids
        self._top = os.path.join(context.config.workspace_base, context.config.sandbox_id)
        self._starter = Starter(context, cgroups, self._top)
        self._made: list[str] = []

    async def start(self, slot_id: str, network: bool, keep: base.Body | None = None) -> base.Body:
        """See `Isolation.start`."""
        if os.geteuid() != 0:
            raise StartFailed("needs root, to give every slot a user of its own")
        if not network:
            raise StartFailed("cannot keep a slot from the network")
        self._open_top()
        uid = keep.uid if keep is not None and keep.uid is not None else self._uids.take()
        try:
            body = await self._starter.start("uid", slot_id, network, uid, keep)
        except BaseException:
            if keep is None:
                self._uids.give_back(uid)
            raise
        os.chown(body.dirs.root, uid, uid)
        return body

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

    async def end(self, body: base.Body) -> dict[str, Any]:
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
        left = await loop.run_in_executor(None, remove_owned, uid)
        proof: dict[str, Any] = {"init_ended": ended, "processes": len(living), "leftovers_removed": left.removed, "clean": ended and not living}
        if not proof["clean"]:
            proof["detail"] = "uid %d still has %d processes" % (uid, len(living))
        elif left.errors:
            proof.update(clean=False, detail="what uid %d left could not be removed: %s" % (uid, left.errors[0]))
        if proof["clean"]:
            base.close_body_fds(body)
            body.groups.remove()
        return proof

    def forget(self, body: base.Body) -> None:
        """See `Isolation.forget`."""
        if body.uid is not None:
            self._uids.give_back(body.uid)

    def close(self) -> None:
        """See `Isolation.close`."""
        while self._made:
            folder = self._made.pop(0)
            try:
                os.rmdir(folder)
            except OSError as error:
                log.info("a folder stays: %s", error)  # another agent uses it, or a quarantined slot is in it
                return
