"""What the modes without namespaces of their own have in common: `uid` and `none` differ in who owns a slot's processes, not in how they start."""

from __future__ import annotations

import os
import shutil
from typing import Any

from sandbox_server.agent.execution.slot_runtime import Dirs, SlotRuntime
from sandbox_server.agent.isolation import base
from sandbox_server.agent.kernel.cgroups import Cgroups, SlotGroups
from sandbox_server.agent.kernel.uids import keeper_of

_LOCK_BYTES = 16 << 20


def library_environment() -> dict[str, str]:
    """What the interpreter needs to find its libraries, where it was started with that; init's only, no slot's."""
    path = os.environ.get("LD_LIBRARY_PATH")
    return {"LD_LIBRARY_PATH": path} if path else {}


async def launch_shared(context: base.Context, mode: str, dirs: Dirs, uid: int | None, groups: SlotGroups, turn: int, own: bool = False) -> base.Launched:
    """Start an init that shares the machine's view with its slot, but for the places all users share where they are to be its `own`.

    Raises:
        StartFailed: with what it said.
    """
    ours, theirs = base.control_pair()
    affinity = context.affinity(turn)
    config: dict[str, Any] = {
        "mode": mode,
        "uid": uid,
        "gid": uid,
        "holder_uid": keeper_of(uid) if uid is not None else None,
        "groups": [],
        "umask": base.UMASK,
        "env": context.environment(len(affinity), dirs.workspace, None if own else dirs.tmp),
        "home": dirs.workspace,
        "roots": [dirs.workspace, "/tmp"] if own else [dirs.workspace, dirs.tmp, "/tmp"],
        "private_mounts": own_places(dirs) if own else None,
        "limits": context.rlimits(groups.limits_memory, groups.limits_processes),
        "affinity": affinity,
        "lib": context.lib_dir,
        "filter": context.filter if own else context.shared_filter,
    }
    argv = base.init_argv(base.interpreter(), context.lib_dir, theirs.fileno())
    return await base.launch(argv, theirs, ours, config, groups.join_fds, library_environment(), context.sets_floor)


def own_places(dirs: Dirs) -> dict[str, str]:
    """What a slot sees in the places all users share, see `slot_places.make_own`."""
    return {
        "/tmp": dirs.tmp,
        "/var/tmp": dirs.tmp,
        "/dev/shm": "mode=1777,size=%d" % base.SHM_BYTES,
        "/dev/mqueue": "mqueue",
        "/run/lock": "mode=1777,size=%d" % _LOCK_BYTES,
    }


def shared_body(slot_id: str, dirs: Dirs, network: bool, uid: int | None, groups: SlotGroups, launched: base.Launched, own: bool) -> SlotRuntime:
    """The body of a slot that sees its folders where they are, but for its own `/tmp`."""
    return SlotRuntime(
        slot_id=slot_id,
        dirs=dirs,
        workspace=dirs.workspace,
        tmp="/tmp" if own else dirs.tmp,
        network=network,
        process=launched.process,
        link=launched.link,
        init_pid=launched.pid,
        init_pidfd=launched.pidfd,
        uid=uid,
        groups=groups,
        shell=base.find_shell(),
        stderr_fd=launched.stderr_fd,
    )


class Starter:
    """Numbers generations and makes their groups.

    Args:
        context: this agent's.
        cgroups: what control groups it can use.
        slots_dir: where the folders of generations go.
    """

    def __init__(self, context: base.Context, cgroups: Cgroups, slots_dir: str) -> None:
        self.context = context
        self._cgroups = cgroups
        self._slots_dir = slots_dir
        self._generation = 0

    async def start(self, mode: str, slot_id: str, network: bool, uid: int | None, keep: SlotRuntime | None, own: bool = False) -> SlotRuntime:
        """Start a body; with `keep`, on the folders of one that has ended; with `own`, with places of its own."""
        self._generation += 1
        name = "%s-%d" % (mode, self._generation)
        dirs = keep.dirs if keep is not None else base.make_dirs(os.path.join(self._slots_dir, name), uid)
        groups = self._cgroups.make_groups(name)
        try:
            launched = await launch_shared(self.context, mode, dirs, uid, groups, self._generation, own)
        except BaseException:
            groups.remove()
            if keep is None:
                shutil.rmtree(dirs.root)  # nobody has been in it
            raise
        finally:
            groups.close_join_fds()
        return shared_body(slot_id, dirs, network, uid, groups, launched, own)
