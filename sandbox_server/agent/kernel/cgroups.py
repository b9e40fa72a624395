"""The control groups of an agent: a leaf for each call, so that exactly its processes can be killed, and limits for each slot.

The leaves need cgroup v2, but none of its controllers. The limits use v2 controllers where they can be enabled, else the v1 hierarchies. Where neither is
possible, only rlimits apply. The agent finds out what is possible by trying it. `Cgroups.errors` contains what has failed.
"""

from __future__ import annotations

import contextlib
import os
import re

from sandbox_server.agent.config import AgentConfig
from sandbox_server.agent.kernel.cgroup_mounts import list_cgroup_mounts, read_own_groups
from sandbox_server.agent.kernel.leaf_groups import SlotLeaves
from sandbox_server.agent.kernel.memory_groups import SLOT_PREFIX, MemoryGroups, machine_memory_bytes, was_ended_by_another_agent
from sandbox_server.agent.kernel.memory_plan import MIB, MemoryPlan, MemoryUsage
from sandbox_server.agent.kernel.slot_limit_groups import SlotLimitGroups, open_procs, write_control_file

_AGENT_GROUP_NAME = re.compile(r"sandbox-pool-(\d+)-[0-9a-f]+\Z")
_V1 = ("memory", "pids", "cpu")
_MOST_KEPT_GROUPS = 16  # Those of runtimes that have ended and whose successors have not been started yet.
#: The weight of all slots of a sandbox together, and that of all slots of the machine, is that of as many normal sessions as a sandbox has slots, but at most
#: this number. The service and each agent have the weight of 3 normal sessions each.
_MAX_SESSIONS = 8
_MAKE_ROUNDS = 100
_SESSION_WEIGHT_V1, _SESSION_WEIGHT_V2 = 1024, 100


def _read(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read()


class SlotGroups:
    """All control groups of one slot runtime.

    Args:
        leaves: the leaves of its calls; None if there can be none here.
        limits: the groups that limit it; None if there can be none here.
        shared_memory: the groups that limit the memory of all slots; None if there can be none here.

    Raises:
        OSError: their files could not be opened. They were removed.

    Attributes:
        limits_memory: whether a control group limits its memory.
        limits_processes: whether a control group limits its number of processes.
        join_fds: descriptors through which init joins the groups when it starts.
        is_given_up: whether the groups were removed, or are those of another slot runtime by now.
    """

    def __init__(self, leaves: SlotLeaves | None, limits: SlotLimitGroups | None, shared_memory: MemoryGroups | None = None) -> None:
        self.leaves = leaves
        self.limits = limits
        self._shared_memory = shared_memory
        self.is_given_up = False
        self.limits_memory = limits is not None and limits.limits_memory
        self.limits_processes = limits is not None and limits.limits_processes
        self.join_fds: list[int] = []
        try:
            for folder in limits.group_folders() if limits is not None else ():
                self.join_fds.append(open_procs(folder))
            if leaves is not None:
                self.join_fds.append(os.dup(leaves.first_procs_fd()))
        except OSError:
            self.close_join_fds()
            self.remove_groups()
            raise

    def find_usage_while_full(self) -> MemoryUsage | None:
        """Return the memory of the slot if slots have to wait for memory now; None if they do not, or if no control group counts it."""
        folder = self.limits.memory_folder if self.limits is not None else None
        if folder is None or self._shared_memory is None:
            return None
        return self._shared_memory.find_usage_while_full(folder)

    def close_join_fds(self) -> None:
        """Close the descriptors after init has joined the groups or failed to start."""
        while self.join_fds:
            os.close(self.join_fds.pop())

    def are_as_new(self) -> bool:
        """Return whether the groups of an ended slot runtime can be those of the next one."""
        if self.limits is None or self.leaves is None or not self.limits.are_as_new() or not self.leaves.are_empty():
            return False
        return self.limits.memory_folder is None or not was_ended_by_another_agent(self.limits.memory_folder)

    def renew_groups(self, share_bytes: int) -> SlotGroups:
        """Return the groups of the next slot runtime: these, which must be as new. This object can no longer reach them.

        Raises:
            OSError: something else has removed one of them, or no file can be opened now. They were removed.
        """
        leaves, limits = self.leaves, self.limits
        try:
            leaves = leaves.renew_leaves() if leaves is not None else None
            limits = limits.renew_groups(share_bytes) if limits is not None else None
        except OSError:
            _remove_both(leaves, limits)
            raise
        finally:
            self.is_given_up = True
        return SlotGroups(leaves, limits, self._shared_memory)

    def remove_groups(self) -> None:
        """Remove all groups of an ended slot runtime. A second call does nothing, because a runtime can be ended again if what came after its end failed."""
        if self.is_given_up:
            return
        self.is_given_up = True
        _remove_both(self.leaves, self.limits)


def _remove_both(leaves: SlotLeaves | None, limits: SlotLimitGroups | None) -> None:
    if leaves is not None:
        leaves.remove_leaves()
    if limits is not None:
        limits.remove_limits()


class Cgroups:
    """Finds out which control groups this agent can use, and creates them for its slots.

    Args:
        boot: the nonce of this agent, so that no two agents use the same folder.
        config: the configuration of the agent, with the limits of its slots.
        slot_processors: how many processors a slot may keep busy at a time; None if the group of a slot need not limit that.

    Attributes:
        errors: the error of each attempt that failed, by its subject.
        memory: what limits the memory of a slot: `cgroup1`, `cgroup2` or `rlimit`.
        pids: what limits the number of processes of a slot: `cgroup1`, `cgroup2` or `rlimit`.
        cpu: what divides the processor between slots: `cgroup1` or `cgroup2`. With `none`, the kernel divides it between sessions or threads.
        kill: how the processes of a call are found: `cgroup2`, or `scan` for a search of /proc.
        memory_groups: the groups that limit the memory of all slots; None if none could be created.
        memory_domain: the same groups, even if they could only be read and not be created; None if there is no such hierarchy.
        plan: how memory is divided between slots.
    """

    def __init__(self, boot: str, config: AgentConfig, slot_processors: int | None = None) -> None:
        self._config = config
        self._slot_processors = slot_processors
        self._boot = boot
        self._processes = config.limits.processes
        self._name = "sandbox-pool-%d-%s" % (os.getpid(), boot[:8])
        self._tops: dict[str, str] = {}
        self._limit_tops: dict[str, str] = {}
        self._processor_group = ""  # that of all slots of the machine
        self._pending_removals: list[str] = []
        self._kept_groups: list[SlotGroups] = []
        self.errors: dict[str, str] = {}
        self.memory = self.pids = "rlimit"
        self.cpu = "none"
        self.kill = "scan"
        self.memory_groups: MemoryGroups | None = None
        self.memory_domain: MemoryGroups | None = None
        self.plan = self._make_plan(None)
        self._probe()

    def _make_plan(self, around_bytes: int | None) -> MemoryPlan:
        """Return how memory is divided between slots.

        Args:
            around_bytes: the limit of the closest control group around this process, in bytes; None if there is none.
        """
        config, machine_mb = self._config, self._config.machine_memory_mb
        machine = machine_memory_bytes() if machine_mb is None else machine_mb * MIB
        if around_bytes is not None:
            machine = min(machine, around_bytes)
        sandbox, slot = config.memory_mb, config.limits.memory_mb
        return MemoryPlan(
            machine_bytes=machine,
            slots=config.slots + config.wanted_spares,
            sandbox_bytes=None if sandbox is None else sandbox * MIB,
            slot_bytes=None if slot is None else slot * MIB,
            has_neighbours=config.slots > 1,
        )

    def _probe(self) -> None:
        own = read_own_groups()
        for mount, kind, options in list_cgroup_mounts():
            if kind == "cgroup2" and "2" not in self._tops:
                self._probe_v2(mount, own.get("", "/"))
            for controller in _V1:
                if kind == "cgroup" and controller in options and controller not in self._limit_tops:
                    self._probe_v1(controller, mount, own.get(controller, "/"), is_alone=len(options.intersection(_V1)) == 1)

    def _make_top(self, key: str, mount: str, path: str) -> str | None:
        for parent in (os.path.normpath(mount + path), mount):
            if os.path.isdir(parent):
                _remove_abandoned_groups(parent)
                top = os.path.join(parent, self._name)
                if top in self._tops.values():
                    return top  # One hierarchy can have several of the controllers.
                try:
                    os.mkdir(top)
                except OSError as error:
                    self.errors[key] = str(error)
                    return None
                self._tops[key] = top
                return top
        return None

    def _probe_v2(self, mount: str, path: str) -> None:
        top = self._make_top("2", mount, path)
        if top is None:
            return
        if os.path.exists(os.path.join(top, "cgroup.kill")):
            self.kill = "cgroup2"
        if "memory" not in _read(os.path.join(mount, "cgroup.controllers")).split():
            return  # Another hierarchy has the memory controller.
        groups = self._make_memory_groups(2, mount, path)
        if groups is not None:
            # A process is in only one group of this hierarchy, so one group for each slot limits everything.
            for name in groups.controllers:
                self._limit_tops[name] = groups.own
                self._record_version(name, "cgroup2")
            if "cpu" in groups.controllers:
                write_control_file(os.path.join(groups.own, "cpu.weight"), str(self._weight_sessions() * _SESSION_WEIGHT_V2))

    def _probe_v1(self, controller: str, mount: str, path: str, is_alone: bool) -> None:
        if controller == "memory":
            groups = self._make_memory_groups(1, mount, path)
            top = groups.own if groups is not None else None
        elif controller == "cpu" and is_alone:
            top = self._make_processor_top(mount, path)
        else:
            top = self._make_top("1" + controller, mount, path)
        if top is not None and controller == "cpu":
            write_control_file(os.path.join(top, "cpu.shares"), str(self._weight_sessions() * _SESSION_WEIGHT_V1))
        if top is not None:
            self._limit_tops[controller] = top
            self._record_version(controller, "cgroup1")

    def _make_processor_top(self, mount: str, path: str) -> str | None:
        """Create the group of this agent in that of all slots of the machine, which is created if no other agent has done so.

        Without the common group, the slots of many sandboxes would together have so much weight that the service and the agents had to wait for them.
        """
        own = os.path.normpath(mount + path)
        machine = self._processor_group = os.path.join(own if os.path.isdir(own) else mount, self._config.slots_group)
        top = os.path.join(machine, self._name)
        _remove_abandoned_groups(os.path.dirname(machine))
        for _ in range(_MAKE_ROUNDS):
            try:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(machine)
                _raise_shares(machine, self._weight_sessions() * _SESSION_WEIGHT_V1)
                _remove_abandoned_groups(machine)
                os.mkdir(top)
            except FileNotFoundError:
                continue  # Another agent has removed the group of the machine at this moment, because it was the last one that used it.
            except OSError as error:
                self.errors["1cpu"] = str(error)
                return None
            self._tops["1cpu"] = top
            return top
        self.errors["1cpu"] = "other agents keep removing %s" % machine
        return None

    def _make_memory_groups(self, version: int, mount: str, path: str) -> MemoryGroups | None:
        groups = self.memory_domain = MemoryGroups.find_domain(version, mount, path)
        self.plan = self._make_plan(groups.domain_bytes)
        try:
            groups.create_groups(self.plan, self._config.slots_group, self._boot)
        except OSError as error:
            self.errors["memory"] = str(error)
            return None
        self.memory_groups = groups
        return groups

    def _weight_sessions(self) -> int:
        return min(self._config.slots, _MAX_SESSIONS)

    def _record_version(self, controller: str, version: str) -> None:
        if controller == "memory":
            self.memory = version
        elif controller == "pids":
            self.pids = version
        else:
            self.cpu = version

    def make_groups(self, name: str) -> SlotGroups:
        """Return the control groups of a new slot runtime: kept ones, or new ones with this name."""
        if self._kept_groups:
            return self._kept_groups.pop().renew_groups(self._protected_bytes())
        limits = self._make_limits(name)  # First, because with cgroup v2 alone the leaves lie in the group that limits the slot.
        try:
            leaves = self._make_leaves(name)
        except OSError:
            _remove_both(None, limits)
            raise
        return SlotGroups(leaves, limits, self.memory_groups)

    def _make_limits(self, name: str) -> SlotLimitGroups | None:
        """Create the groups that limit a new slot runtime. Returns None if no hierarchy can be written.

        The processor needs no explicit weight: all new groups have the same weight, so slots get equal parts, however many sessions they have.
        """
        if not self._limit_tops:
            return None
        folders = {key: os.path.join(top, SLOT_PREFIX + name) for key, top in self._limit_tops.items()}
        memory_bytes, share_bytes = self.plan.slot_hard_limit_bytes, self._protected_bytes()
        limits = SlotLimitGroups(folders, memory_bytes, share_bytes, self._processes, self.remove_when_empty, self._slot_processors)
        limits.create_groups()
        return limits

    def _protected_bytes(self) -> int:
        return self.memory_groups.protected_bytes() if self.memory_groups is not None else 0

    def keep_or_remove_groups(self, groups: SlotGroups, may_keep: bool) -> None:
        """Keep the groups of an ended slot runtime for the next one if they are as new, or else remove them.

        To create and to remove the groups of a slot takes the kernel and this process a millisecond and a half.

        Args:
            groups: the groups. Nothing is done if they are kept already, or were given up.
            may_keep: whether they may be kept.
        """
        if groups.is_given_up or groups in self._kept_groups:
            return
        try:
            is_kept = may_keep and len(self._kept_groups) < _MOST_KEPT_GROUPS and groups.are_as_new()
        except OSError:
            is_kept = False  # Something else has removed one of them.
        if is_kept:
            self._kept_groups.append(groups)
        else:
            groups.remove_groups()

    def _make_leaves(self, name: str) -> SlotLeaves | None:
        """Create the leaves of a new slot runtime. Returns None if the processes of calls must be found by a search of /proc."""
        if self.kill != "cgroup2":
            return None
        if self.memory == "cgroup2":
            return SlotLeaves.create_leaves(os.path.join(self._limit_tops["memory"], SLOT_PREFIX + name, "calls"), self.remove_when_empty)
        return SlotLeaves.create_leaves(os.path.join(self._tops["2"], "slot-" + name), self.remove_when_empty)

    def remove_when_empty(self, path: str) -> None:
        """Remove a group now if it is empty, or else at a later call of this method or of `remove_agent_groups`."""
        self._pending_removals.append(path)
        self._pending_removals = [pending for pending in self._pending_removals if not _remove_group(pending)]

    def remove_agent_groups(self) -> None:
        """Remove all groups that this agent has created. Call it after all slots have ended."""
        while self._kept_groups:
            self._kept_groups.pop().remove_groups()
        for path in [*self._pending_removals, *self._tops.values()]:
            _remove_group(path)
        if self._processor_group:
            _remove_group(self._processor_group)  # It stays as long as another agent has a group in it.
        if self.memory_groups is not None:
            self.memory_groups.remove_groups()


def _remove_group(path: str) -> bool:
    try:
        os.rmdir(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False  # A process of the group has not been reaped yet.
    return True


def _raise_shares(folder: str, shares: int) -> None:
    """Set the weight of a v1 group for the processor, unless it is higher already."""
    path = os.path.join(folder, "cpu.shares")
    if int(_read(path)) < shares:
        write_control_file(path, str(shares))


def _remove_abandoned_groups(parent: str) -> None:
    """Remove the groups of agents that no longer run."""
    for name in os.listdir(parent):
        match = _AGENT_GROUP_NAME.match(name)
        if match is None or os.path.exists("/proc/" + match.group(1)):
            continue
        for folder, _, _ in os.walk(os.path.join(parent, name), topdown=False):
            _remove_group(folder)
