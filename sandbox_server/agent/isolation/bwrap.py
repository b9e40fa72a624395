"""The mode `bwrap`: bubblewrap gives each slot its own namespaces.

If the agent runs as root, there is no user namespace, and init changes to the user of the slot. Otherwise bubblewrap creates a user namespace.

Where the kernel can do it, bubblewrap mounts the file systems only once for all slots of an agent, for a template from which the inits of slots are forked into
namespaces of their own. Otherwise bubblewrap and an interpreter are executed for each slot. The first slot of an agent shows which of the two works.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from typing import Any, Protocol, Sequence

from sandbox_server.agent.errors import StartFailed
from sandbox_server.agent.execution.processes.descriptor_waits import wait_readable
from sandbox_server.agent.execution.slot_runtime import CacheFolder, Dirs, ReadOnlyEntry, SlotNetwork, SlotRuntime
from sandbox_server.agent.init import privileges
from sandbox_server.agent.isolation import base, init_start
from sandbox_server.agent.isolation.bwrap_arguments import CACHE, LIB, TMP, WORKSPACE
from sandbox_server.agent.isolation.bwrap_start import INSIDE_UID, BwrapPlan, BwrapStart, SharedView, find_bwrap
from sandbox_server.agent.isolation.bwrap_template import BwrapTemplate
from sandbox_server.agent.isolation.etc_folder import write_accounts, write_etc
from sandbox_server.agent.isolation.forking.slot_template import MAX_FIRST_TRIES
from sandbox_server.agent.isolation.reuse.empty_folders import EmptyFolders
from sandbox_server.agent.kernel import procfs
from sandbox_server.agent.kernel.cgroups import Cgroups, SlotGroups
from sandbox_server.agent.kernel.uids import UidRange
from sandbox_server.agent.network.addresses import ROUTER

log = logging.getLogger(__name__)


class _Starter(Protocol):
    """One way to start the init of a slot."""

    async def start_init(self, plan: BwrapPlan) -> init_start.StartedInit: ...
    def end_start(self) -> None: ...


class BwrapIsolation:
    """The mode `bwrap`."""

    name = "bwrap"
    tmp_isolation = "own"
    caches = True
    read_only_entries = True

    def __init__(self, context: base.IsolationContext, cgroups: Cgroups, uids: UidRange) -> None:
        self._context = context
        self._cgroups = cgroups
        self._uids = uids
        self._is_root = os.geteuid() == 0
        self.networks: tuple[str, ...] = ("none", "shared") if context.networks is None else ("none", "internet")
        self._runtime_count = 0
        self._view: SharedView | None = None
        self._starter: _Starter | None = None  # None until it is known how inits can be started here.
        self._first_start_lock = asyncio.Lock()
        self._template_tries = 0
        self.slot_start = "executed"
        self._folders = EmptyFolders()
        self._separates_sockets = privileges.can_separate_abstract_sockets()

    def _set_up(self) -> SharedView:
        """Prepare what is the same for every slot, at the first call."""
        if self._view is None:
            etc = os.path.join(self._context.config.base_dir, "etc")
            view = SharedView(find_bwrap(), etc, self._context.lib_dir, self._context.config.expose)
            write_etc(etc, ROUTER if self._context.networks is not None else None)
            self._view = view
        return self._view

    async def start_runtime(
        self,
        slot_id: str,
        has_network: bool,
        reused: SlotRuntime | None = None,
        cache: CacheFolder | None = None,
        read_only: Sequence[ReadOnlyEntry] = (),
    ) -> SlotRuntime:
        """See `Isolation.start_runtime`."""
        view = self._set_up()
        shell = base.find_shell()  # first, because a failure after the start of init would leave init behind
        uid = reused.uid if reused is not None else self._uids.take_uid() if self._is_root else None
        self._runtime_count += 1
        name = "bwrap-%d" % self._runtime_count
        dirs = reused.dirs if reused is not None else None
        groups = network = None
        try:
            if has_network and self._context.networks is not None:
                network = await self._context.networks.take_network()
            if dirs is None:
                dirs = self._folders.make_folders(os.path.join(self._context.slots_dir, name), uid)
            groups = self._cgroups.make_groups(name)
            plan = self._make_plan(has_network, network, dirs, uid, groups, cache, read_only)
            started_init = await self._start_init(view, plan)
        except BaseException:  # also when this task is cancelled
            if groups is not None:
                groups.remove_groups()
            await self._release_network(network)
            if reused is None:
                self._undo_start(dirs, uid)
            raise
        finally:
            if groups is not None:
                groups.close_join_fds()
            if network is not None:
                os.close(network.namespace_fd)
        runtime = started_init.to_runtime(
            slot_id, dirs, WORKSPACE, TMP, has_network=has_network, uid=uid, groups=groups, shell=shell, has_pid_namespace=True, cache=cache
        )
        runtime.network = network
        runtime.may_have_passed_files = self._can_pass_files(has_network, cache) or (reused is not None and reused.may_have_passed_files)
        return runtime

    async def _release_network(self, network: SlotNetwork | None) -> str | None:
        """Remove the network of a slot that has ended or could not be started. Returns why it is left, if it is."""
        if network is None or self._context.networks is None:
            return None
        try:
            await self._context.networks.release_network(network)
        except (StartFailed, OSError) as error:
            log.error("the network of a slot could not be removed: %s", error)
            return str(error)
        return None

    def _undo_start(self, dirs: Dirs | None, uid: int | None) -> None:
        """Delete the new folders of a runtime that could not be started, and give its user back. No process of the slot has used them."""
        if dirs is not None:
            self._folders.delete_folders(dirs.root)
        if uid is not None:
            self._uids.give_back_uid(uid)

    def _can_pass_files(self, has_network: bool, cache: CacheFolder | None) -> bool:
        """Return whether a slot can pass open files to another one, for which both need a socket that they can reach."""
        return cache is not None or bool(self._context.config.expose) or (has_network and self._context.networks is None and not self._separates_sockets)

    def _make_plan(
        self,
        has_network: bool,
        network: SlotNetwork | None,
        dirs: Dirs,
        uid: int | None,
        groups: SlotGroups,
        cache: CacheFolder | None,
        read_only: Sequence[ReadOnlyEntry],
    ) -> BwrapPlan:
        config = {
            "mode": "bwrap",
            "uid": uid,
            "gid": uid,
            "groups": cache.groups if cache is not None else [],
            "private_mounts": None,
            "umask": cache.umask if cache is not None else base.UMASK,
            "env": self._context.environment(WORKSPACE, None, CACHE if cache is not None else None),
            "home": WORKSPACE,
            "roots": [WORKSPACE, TMP],
            "read_only": [entry.message for entry in read_only],
            "limits": self._context.rlimits(groups.limits_memory, groups.limits_processes),
            "lib": LIB,
            "filter": self._context.filter,
        }
        accounts = write_accounts(dirs.root, uid if uid is not None else INSIDE_UID, cache.groups if cache is not None else ())
        return BwrapPlan(dirs, accounts, uid, groups, has_network, network, cache, read_only, config, self._context.sets_floor)

    async def _start_init(self, view: SharedView, plan: BwrapPlan) -> init_start.StartedInit:
        if self._starter is None:
            async with self._first_start_lock:
                if self._starter is None:
                    return await self._start_first_init(view, plan)
        return await self._starter.start_init(plan)

    async def _start_first_init(self, view: SharedView, plan: BwrapPlan) -> init_start.StartedInit:
        """Start the first init of this agent, and so find out how inits can be started here. A template that lacks something is tried again later."""
        may_try_again = False
        networks = self._context.networks
        if self._context.config.slot_start == "auto":
            template = BwrapTemplate(view, self._context.config.base_dir, self._is_root, self._context.filter, networks)
            try:
                first = await template.start_init(plan)
            except StartFailed as error:
                template.end_start()
                self._template_tries += 1
                may_try_again = error.temporary and self._template_tries < MAX_FIRST_TRIES
                self.slot_start = "executed: %s" % error
                if networks is not None:
                    raise
                log.info("slots are not forked from a template: %s", error)
            except BaseException:  # also when this task is cancelled
                template.end_start()
                raise
            else:
                self._starter, self.slot_start = template, "forked"
                return first
        if networks is not None:
            raise StartFailed("slots with networks of their own must be forked from a template, and the agent is told to execute them")
        starter = BwrapStart(view, self._is_root)
        first = await starter.start_init(plan)
        if not may_try_again:
            self._starter = starter
        return first

    async def end_runtime(self, runtime: SlotRuntime) -> dict[str, Any]:
        """See `Isolation.end_runtime`. When the first process of a pid namespace has been reaped, the kernel has killed all others in it."""
        runtime.link.close_link()
        if runtime.init_pidfd >= 0 and hasattr(signal, "pidfd_send_signal"):
            try:
                signal.pidfd_send_signal(runtime.init_pidfd, signal.SIGKILL)
            except ProcessLookupError:
                pass  # It has ended by itself.
        else:
            runtime.process.kill()
        ended = runtime.init_pidfd < 0 or await wait_readable(runtime.init_pidfd, base.END_TIMEOUT_S)
        # A forked init is the child of this agent that has just ended. Otherwise this waits for bubblewrap, which ends after init.
        ended = ended and await init_start.wait_for_exit(runtime.process, base.END_TIMEOUT_S)
        proof: dict[str, Any] = {"namespace_ended": ended, "clean": ended}
        if not ended:
            proof["detail"] = "init %d did not end within %g s of SIGKILL" % (runtime.init_pid, base.END_TIMEOUT_S)
            return proof
        mounts = procfs.mounts_under(runtime.dirs.root)
        proof["mounts"] = len(mounts)
        if mounts:
            proof.update(clean=False, detail="%s is still mounted" % mounts[0])
        if runtime.network is not None:
            left = await self._release_network(runtime.network)
            proof["network_ended"] = left is None
            if left is not None:
                proof.update(clean=False, detail="the network of the slot could not be removed: %s" % left)
        init_start.close_runtime_fds(runtime)
        self._cgroups.keep_or_remove_groups(runtime.groups, may_keep=runtime.limit_end is None and not mounts)
        return proof

    def keep_folders(self, runtime: SlotRuntime) -> bool:
        """See `Isolation.keep_folders`."""
        return not runtime.may_have_passed_files and self._folders.keep_folders(runtime.dirs)

    def free_uid(self, runtime: SlotRuntime) -> None:
        """See `Isolation.free_uid`."""
        self._folders.forget_folders(runtime.dirs)  # If they were not kept, they have been deleted.
        if runtime.uid is not None:
            self._uids.give_back_uid(runtime.uid)

    def remove_mode_files(self) -> None:
        """See `Isolation.remove_mode_files`. Everything that the mode creates lies in the folder of the agent."""
        if self._starter is not None:
            self._starter.end_start()
