"""The mode `uid`: each slot has its own user. Root starts the init of each slot. Init stays privileged, and everything that it starts runs as the slot's user.

A slot cannot read the files of other slots (their folders have the mode 0700) or signal their processes, but it can see that they exist. If init may create
namespaces, a slot has its own `/tmp`, `/dev/shm` and IPC. Otherwise these are shared, and what the user owns there is removed when the slot ends; the proof of
a reset is that nothing is left. There are no shared caches in this mode: a slot could keep a hard link to a file in the cache, and exchange data with other
slots through it after its rights have been narrowed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import shutil
import stat
from typing import Any, Collection, Sequence

from sandbox_server.agent.errors import StartFailed
from sandbox_server.agent.execution.slot_runtime import CacheFolder, ReadOnlyEntry, SlotRuntime
from sandbox_server.agent.init.private_mounts import FAILURE_PREFIX
from sandbox_server.agent.isolation import base, init_start
from sandbox_server.agent.isolation.shared_folders import SHARED_FOLDERS, list_left_trash_folders, remove_owned
from sandbox_server.agent.isolation.starter import SharedViewStarter
from sandbox_server.agent.isolation.sweep import TRASH_PREFIX, Sweep
from sandbox_server.agent.kernel import procfs
from sandbox_server.agent.kernel.cgroups import Cgroups
from sandbox_server.agent.kernel.trash import Trash
from sandbox_server.agent.kernel.uids import UidRange, helper_uid_of, kill_uid

log = logging.getLogger(__name__)


class UidIsolation:
    """The mode `uid`."""

    name = "uid"
    networks: tuple[str, ...] = ("shared",)
    caches = False

    def __init__(self, context: base.IsolationContext, cgroups: Cgroups, uids: UidRange, trash: Trash) -> None:
        self._context = context
        self._uids = uids
        self._trash = trash
        self._top = os.path.join(context.config.workspace_base, context.config.sandbox_id)
        self._lib = os.path.join(self._top, "lib")
        # The code of init is copied beside the folders of the slots, because an init with its own /tmp cannot see the /tmp of the machine.
        self._starter = SharedViewStarter(dataclasses.replace(context, lib_dir=self._lib), cgroups, self._top, forks=True)
        self._made_folders: list[str] = []
        self._uid_range = range(0)
        self._private_mounts_work = False
        hidden = self._find_hidden_path()
        self.tmp_isolation = "own" if hidden is None else "shared: %s" % hidden

    @property
    def read_only_entries(self) -> bool:
        """See `Isolation.read_only_entries`. A slot needs mounts of its own, and no second path to its folders: it sees all mounts of the machine."""
        return self.tmp_isolation == "own" and procfs.find_other_path(os.path.realpath(self._top)) is None

    @property
    def slot_start(self) -> str:
        """See `Isolation.slot_start`."""
        return self._starter.slot_start

    async def start_runtime(
        self,
        slot_id: str,
        has_network: bool,
        reused: SlotRuntime | None = None,
        cache: CacheFolder | None = None,
        read_only: Sequence[ReadOnlyEntry] = (),
    ) -> SlotRuntime:
        """See `Isolation.start_runtime`."""
        if os.geteuid() != 0:
            raise StartFailed("this mode needs root, to give every slot its own user")
        if not has_network:
            raise StartFailed("this mode cannot keep a slot from the network")
        if self._context.config.internet:
            raise StartFailed("this mode cannot give a slot a network of its own (network: internet); the mode bwrap can")
        if cache is not None:
            raise StartFailed("this mode cannot take a shared cache away from a slot")
        if read_only and not self.read_only_entries:
            raise StartFailed("this mode cannot keep a slot from changing its workspace on this machine")
        await self._prepare_users()
        uid = reused.uid if reused is not None and reused.uid is not None else self._uids.take_uid()
        try:
            runtime = await self._start_with_private_mounts_if_possible(slot_id, has_network, uid, reused, read_only)
        except BaseException:  # also when this task is cancelled
            if reused is None:
                self._uids.give_back_uid(uid)
            raise
        # The slot must not own this folder: it could open it to another slot, in whose mount namespace nothing keeps the read-only entries in their places.
        os.chown(runtime.dirs.root, 0, uid)
        os.chmod(runtime.dirs.root, 0o710)
        return runtime

    async def _start_with_private_mounts_if_possible(
        self, slot_id: str, has_network: bool, uid: int, reused: SlotRuntime | None, read_only: Sequence[ReadOnlyEntry]
    ) -> SlotRuntime:
        """Start a runtime with its own `/tmp`, `/dev/shm` and IPC. If init may not create namespaces here, this and all later runtimes share the machine's."""
        if self.tmp_isolation == "own":
            try:
                runtime = await self._starter.start_runtime("uid", slot_id, has_network, uid, reused, has_private_mounts=True, read_only=read_only)
            except StartFailed as error:
                if self._private_mounts_work or read_only or FAILURE_PREFIX not in str(error):
                    raise
                self.tmp_isolation = "shared: %s" % error  # The first slot shows whether init may create namespaces here.
            else:
                self._private_mounts_work = True
                return runtime
        return await self._starter.start_runtime("uid", slot_id, has_network, uid, reused)

    def _find_hidden_path(self) -> str | None:
        """Check that nothing that slots need lies in a folder that private mounts would hide. Returns None, or what lies there."""
        needed = {"workspace_base": self._top, "the interpreter": base.interpreter(), "its library": os.path.realpath(os.__file__)}
        for name, path in needed.items():
            for folder in SHARED_FOLDERS:
                if (os.path.realpath(path) + "/").startswith(os.path.realpath(folder) + "/"):
                    return "%s lies in %s" % (name, folder)
        return None

    async def _prepare_users(self) -> None:
        """Before the first slot: lock the user ids, and remove what these users have left if an earlier agent was killed."""
        self._create_top_folder()
        if not self._uid_range:
            uids = self._uids.lock_range()
            self._trash.discard_folder(self._lib)
            shutil.copytree(self._context.lib_dir, self._lib)
            for left in list_left_trash_folders(self._trash_prefix(uids)):
                self._trash.discard_folder(left)
            await self._sweep(uids, uids)
            self._uid_range = uids

    @staticmethod
    def _trash_prefix(uids: range) -> str:
        return "%s%d-" % (TRASH_PREFIX, uids.start)

    async def _sweep(self, owner_uids: Collection[int], slot_uids: range) -> Sweep:
        sweep = await asyncio.get_running_loop().run_in_executor(None, remove_owned, owner_uids, slot_uids, self._trash_prefix(slot_uids), (self._top,))
        for folder in sweep.trash_folders:
            self._trash.discard_folder(folder)
        if sweep.unsearched:
            log.warning("folders of other users could not be searched for leftovers: %s", "; ".join(sweep.unsearched))
        return sweep

    def _create_top_folder(self) -> None:
        """Create the folder of the slots and check its parents: slots must be able to pass them, and only root may own them, or a slot could replace one."""
        for folder in (self._context.config.workspace_base, self._top):
            if not os.path.isdir(folder):
                os.makedirs(folder)
                os.chmod(folder, 0o711)
                self._made_folders.insert(0, folder)
        path = self._top
        while True:
            info = os.lstat(path)
            if not stat.S_ISDIR(info.st_mode) or info.st_uid != 0 or (info.st_mode & 0o022 and not info.st_mode & stat.S_ISVTX):
                raise StartFailed("%s is not a folder that only root can change" % path)
            if not info.st_mode & 0o001:
                raise StartFailed("the user of a slot cannot pass %s (mode %o); set workspace_base to a folder it can pass" % (path, info.st_mode & 0o7777))
            if path == "/":
                return
            path = os.path.dirname(path)

    async def end_runtime(self, runtime: SlotRuntime) -> dict[str, Any]:
        """See `Isolation.end_runtime`."""
        uid = runtime.uid
        if uid is None:
            raise ValueError("a runtime of the mode uid must have a uid")
        runtime.link.close_link()
        loop = asyncio.get_running_loop()
        # Init kills the processes of its slot when its socket is closed. It may be slow or stopped, so the processes are also killed from here.
        ended = await init_start.wait_for_exit(runtime.process, base.END_TIMEOUT_S)
        if not ended:
            runtime.process.kill()
            ended = await init_start.wait_for_exit(runtime.process, base.END_TIMEOUT_S)
        living = await loop.run_in_executor(None, kill_uid, uid)
        proof: dict[str, Any] = {"init_ended": ended, "processes": len(living), "clean": ended and not living, "places": self.tmp_isolation}
        if not proof["clean"]:
            proof["detail"] = "uid %d still has %d processes" % (uid, len(living))
        elif self.tmp_isolation != "own":  # Private mounts have been removed with the last process.
            left = await self._sweep((uid, helper_uid_of(uid)), self._uid_range)
            proof.update(leftovers_removed=left.removed, unswept=len(left.unsearched))
            if left.errors:
                proof.update(clean=False, detail="files of uid %d could not be removed: %s" % (uid, left.errors[0]))
        if proof["clean"]:
            init_start.close_runtime_fds(runtime)
            runtime.groups.remove_groups()
        return proof

    def keep_folders(self, runtime: SlotRuntime) -> bool:
        """See `Isolation.keep_folders`. Every runtime of this mode gets new folders."""
        return False

    def free_uid(self, runtime: SlotRuntime) -> None:
        """See `Isolation.free_uid`."""
        if runtime.uid is not None:
            self._uids.give_back_uid(runtime.uid)

    def remove_mode_files(self) -> None:
        """See `Isolation.remove_mode_files`."""
        self._starter.end_template()
        self._trash.discard_folder(self._lib)
        self._uid_range = range(0)
        while self._made_folders:
            folder = self._made_folders.pop(0)
            try:
                os.rmdir(folder)
            except OSError as error:
                log.info("a folder is not removed: %s", error)  # Another agent uses it, or it contains a quarantined slot.
                return
