"""The transitions of a slot: `reset` prepares it for its next holder; `equip` and `narrow` change the rights of its current holder.

Each transition ends the runtime of the slot, proves its end and starts another one. Only one runs at a time.
"""

from __future__ import annotations

import asyncio
from typing import Any, Coroutine, Sequence

from sandbox_server.agent.allowed_hosts import MAX_ENTRIES, find_entry_problem, permits_entry
from sandbox_server.agent.errors import Refused, StartFailed
from sandbox_server.agent.execution.slot_runtime import CacheFolder, SlotRuntime
from sandbox_server.agent.isolation.base import find_dirs_problem
from sandbox_server.agent.slots.read_only_entries import MAX_NAMES, check_names, find_entries, prepare_entries
from sandbox_server.agent.slots.runtimes import RuntimePool
from sandbox_server.agent.slots.slots import BROKEN, QUARANTINED, READY, RESETTING, STARTING, AgentSlot


class SlotTransitions:
    """The transitions of one slot. A *renewal* is the task of a reset or of a verification: it prepares the slot for its next holder.

    Args:
        slot: the slot.
        runtimes: starts and ends its runtimes.
    """

    def __init__(self, slot: AgentSlot, runtimes: RuntimePool) -> None:
        self.slot = slot
        self.runtimes = runtimes
        self.exchange_lock = asyncio.Lock()  # held while the runtime is replaced
        self._renewal: asyncio.Task[dict[str, Any]] | None = None
        self._unproven_runtime: SlotRuntime | None = None

    # The next holder.

    def start_reset(self, epoch: Any, has_network: bool, keeps_files: bool) -> asyncio.Task[dict[str, Any]]:
        """Begin to clean the slot for its next holder. From now on, requests of earlier holders are refused.

        Args:
            epoch: the epoch of the next holder.
            has_network: whether the next holder has the network.
            keeps_files: whether the folders of the slot stay with their content.

        Returns:
            The task, whose result is the answer to the service. A repeated request with the same epoch gets the same task.

        Raises:
            Refused: the epoch is not higher than the current one, or the isolation mode cannot keep the network away.
        """
        renewal = self.find_renewal(epoch)
        if renewal is not None:
            return renewal
        self.check_can_renew(epoch, has_network)
        old_spool_folder = self.slot.begin_lease(epoch)
        return self.start_renewal(self._reset(epoch, has_network, keeps_files, old_spool_folder))

    def find_renewal(self, epoch: Any) -> asyncio.Task[dict[str, Any]] | None:
        """Return the task of the reset or verification that began the lease with this epoch, if that is the current lease."""
        return self._renewal if epoch == self.slot.epoch else None

    def check_can_renew(self, epoch: Any, has_network: bool) -> None:
        """Check that the slot can be given to its next holder.

        Raises:
            Refused: it cannot.
        """
        slot = self.slot
        if isinstance(epoch, bool) or not isinstance(epoch, int):
            raise Refused("invalid", "epoch must be an integer")
        if slot.state == STARTING:
            raise Refused("slot_unavailable", "slot %s is still starting" % slot.slot_id)
        if epoch <= slot.epoch:
            raise Refused("stale_epoch", "slot %s is at epoch %d, not below %d" % (slot.slot_id, slot.epoch, epoch))
        if not has_network:
            self._check_can_be_offline()

    def start_renewal(self, renewal: Coroutine[Any, Any, dict[str, Any]]) -> asyncio.Task[dict[str, Any]]:
        """Run the coroutine that prepares the slot for its next holder. `find_renewal` returns its task from now on."""
        if self.slot.state != QUARANTINED:
            self.slot.set_state(RESETTING)
        self._renewal = self.slot.loop.create_task(renewal)
        return self._renewal

    async def _reset(self, epoch: int, has_network: bool, keeps_files: bool, old_spool_folder: str) -> dict[str, Any]:
        began = self.slot.loop.time()
        async with self.exchange_lock:
            self.runtimes.trash.discard_folder(old_spool_folder)
            if self.slot.state == QUARANTINED:
                return {"state": QUARANTINED, "detail": self.slot.detail, "proof": {}, "duration_s": 0.0}
            proof = await self.replace_runtime(has_network, keeps_files)
            return self.apply_proof(epoch, proof, self.slot.loop.time() - began)

    async def replace_runtime(
        self, has_network: bool, keeps_files: bool, cache: CacheFolder | None = None, new_read_only: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Replace the runtime of the slot by a new one. The caller holds `exchange_lock`.

        Args:
            has_network: whether the new runtime has the network.
            keeps_files: whether the new runtime is started on the folders of the old one.
            cache: the shared cache to mount.
            new_read_only: the names of the entries of the kept workspace that become read-only, in addition to those of the lease.

        Returns:
            The proof of the old runtime's end. `broken` is True in it if no new runtime could be started. `refused` is in it if an entry cannot be made
            read-only; the new runtime then has the rights of the old one.
        """
        try:
            return await self._exchange_runtime(has_network, keeps_files, cache, new_read_only)
        except (StartFailed, OSError) as error:
            return {"clean": False, "broken": True, "detail": str(error)}

    def apply_proof(self, epoch: int, proof: dict[str, Any], duration_s: float) -> dict[str, Any]:
        """Put the slot into the state that the proof allows, unless the slot has yet another holder by now.

        Args:
            epoch: the lease for which the runtime was replaced.
            proof: the result of `replace_runtime`.
            duration_s: how long it took, in seconds.

        Returns:
            The answer to the service.
        """
        is_clean = bool(proof.get("clean"))
        detail = None if is_clean else str(proof.get("detail", "the end of the slot could not be proven"))
        state = READY if is_clean else BROKEN if proof.get("broken") else QUARANTINED
        if epoch == self.slot.epoch or state == QUARANTINED:
            self.slot.set_state(state, detail)
        return {"state": READY if state == READY else QUARANTINED, "detail": detail, "proof": proof, "duration_s": duration_s}

    async def _exchange_runtime(self, has_network: bool, keeps_files: bool, cache: CacheFolder | None, new_read_only: Sequence[str]) -> dict[str, Any]:
        """End the old runtime; once its end is proven, start a new one."""
        slot = self.slot
        proof: dict[str, Any] = {"clean": True}
        old = slot.detach_runtime() or self._unproven_runtime
        if old is not None:
            # Remembered until its end is proven. If this exchange fails, the next one must not find that there is nothing to end.
            self._unproven_runtime = old
            proof = await self.runtimes.end_runtime(old, keeps_files)
            if not proof["clean"]:
                return proof
            self._unproven_runtime = None
        if keeps_files and old is not None:
            refused = await self._prepare_read_only(old, new_read_only)
            if refused is not None:
                proof["refused"], has_network, cache = refused, old.has_network, old.cache
            runtime = await self.runtimes.restart_runtime(old, slot.slot_id, has_network, cache, slot.lease.read_only)
            problem = await self._limit_hosts(runtime)
            if problem is not None:
                slot.take_runtime(runtime)
                return dict(proof, clean=False, broken=True, detail=problem)
        else:
            runtime = await self.runtimes.new_runtime(slot.slot_id, has_network)
            problem = find_dirs_problem(runtime.dirs, runtime.uid)
            proof["workspace_empty"] = problem is None
            if problem is not None:
                proof.update(clean=False, detail=problem)
        if not slot.take_runtime(runtime):
            proof.update(clean=False, detail="the new init has ended")
        return proof

    async def _prepare_read_only(self, ended: SlotRuntime, names: Sequence[str]) -> Refused | None:
        """Prepare the entries that become read-only, and add them to the lease. Returns why that is not possible, if it is not."""
        lease = self.slot.lease  # A reset that begins meanwhile gives the slot another lease, which must not get these entries.
        if not names:
            return None
        try:
            new = await self.slot.loop.run_in_executor(None, prepare_entries, ended.dirs, names)
        except Refused as refused:
            return refused
        except OSError as error:
            return Refused("file_error", "read_only: the entries cannot be made read-only: %s" % error)
        lease.read_only += new
        return None

    # The same holder with other rights.

    async def equip_slot(self, has_network: bool, cache_key: Any) -> None:
        """Give the holder a shared cache, and the network or not. Its processes end; its files stay.

        Args:
            has_network: whether the holder has the network from now on.
            cache_key: the key of the cache; None: no cache.

        Raises:
            Refused: the isolation mode does not support it, or the sandbox has no network.
        """
        if has_network and not self.runtimes.config.network:
            raise Refused("invalid", "this sandbox gives its slots no network")
        if not has_network:
            self._check_can_be_offline()
        cache = None
        if cache_key is not None:
            if not self.runtimes.isolation.caches:
                raise Refused("not_implemented", "slots with a cache need the mode bwrap, not %s" % self.runtimes.isolation.name)
            cache = self.runtimes.caches.get_cache(cache_key)
        await self._change_rights(has_network, cache)

    async def _limit_hosts(self, runtime: SlotRuntime) -> str | None:
        """Let a runtime, which has run nothing of its holder yet, reach the hosts of the lease alone. Returns why that failed, if it did."""
        hosts, networks = self.slot.lease.allow_hosts, self.runtimes.networks
        if hosts is None or runtime.network is None or networks is None:
            return None
        try:
            await networks.limit_network(runtime.network, hosts)
        except (StartFailed, OSError) as error:
            return "its network could not be limited to allow_hosts: %s" % error
        return None

    async def limit_hosts(self, allow_hosts: Any) -> None:
        """Let the slot reach some hosts alone, for the rest of its lease. A repeated request changes nothing.

        Args:
            allow_hosts: the entries of `allow_hosts` of the lease.

        Raises:
            Refused: an entry is wrong or not permitted by the sandbox, or the slots have no networks of their own.
        """
        slot, permitted = self.slot, self.runtimes.config.allow_hosts
        hosts = tuple(allow_hosts) if isinstance(allow_hosts, list) and len(allow_hosts) <= MAX_ENTRIES else None
        if hosts is None or any(find_entry_problem(entry) is not None for entry in hosts):
            raise Refused("invalid", "allow_hosts must be a list of at most %d hosts and IPv4 networks" % MAX_ENTRIES)
        if self.runtimes.networks is None:
            raise Refused("not_implemented", "allow_hosts: the slots of this sandbox have no networks of their own")
        if permitted is not None and not all(permits_entry(permitted, entry) for entry in hosts):
            raise Refused("invalid", "allow_hosts may only narrow what the sandbox permits")
        lease, epoch = slot.lease, slot.epoch
        if lease.allow_hosts == hosts:
            return
        if lease.allow_hosts is not None:
            raise Refused("invalid", "allow_hosts of a lease cannot be changed")
        async with self.exchange_lock:
            if slot.epoch != epoch:
                raise Refused("stale_epoch", "slot %s was given back meanwhile" % slot.slot_id)
            lease.allow_hosts = hosts
            problem = await self._limit_hosts(slot.current_runtime())
        if problem is not None:
            slot.set_state(BROKEN, problem)
            raise Refused("slot_unavailable", problem)

    async def narrow_slot(self, has_network: bool, cache_key: Any, read_only: Any = ()) -> list[str]:
        """Take the network, the cache, or the right to change entries of the workspace away from the holder, which never gets them back.

        Its processes end; its files stay. Either all is taken away, or, where this raises `Refused`, nothing.

        Args:
            has_network: whether the holder keeps the network.
            cache_key: the key of the cache that the holder keeps; None: it keeps none.
            read_only: the names of the entries at the top of the workspace that become read-only. Those that are read-only already stay so.

        Returns:
            The names of all entries that are read-only now.

        Raises:
            Refused: the holder does not have what it is to keep, the isolation mode does not support it, or an entry cannot be made read-only.
        """
        runtime, cache = self.slot.current_runtime(), self.slot.lease.cache
        if has_network and not runtime.has_network:
            raise Refused("invalid", "narrow only takes rights away, and this slot has no network")
        if cache_key is not None and (cache is None or cache.key != cache_key):
            raise Refused("invalid", "narrow only takes rights away, and this slot does not have the cache %s" % ascii(cache_key)[:100])
        if not has_network:
            self._check_can_be_offline()
        new_read_only = self._find_new_read_only(runtime, read_only)
        if has_network != runtime.has_network or (cache is not None and cache_key is None) or new_read_only:
            await self._change_rights(has_network, cache if cache_key is not None else None, new_read_only)
        return [entry.name for entry in self.slot.lease.read_only]

    def _find_new_read_only(self, runtime: SlotRuntime, read_only: Any) -> list[str]:
        """Check a request for read-only entries as far as that is possible while the slot runs. Returns the names that are not read-only yet."""
        present = {entry.name for entry in self.slot.lease.read_only}
        new = [name for name in check_names(read_only) if name not in present]
        if not new:
            return []
        if not self.runtimes.isolation.read_only_entries:
            raise Refused(
                "not_implemented", "read-only entries need a slot with mounts of its own, which the mode %s has not here" % self.runtimes.isolation.name
            )
        if len(present) + len(new) > MAX_NAMES:
            raise Refused("invalid", "read_only: at most %d entries of a workspace can be read-only" % MAX_NAMES)
        find_entries(runtime.dirs, new)  # They are examined again when no process runs. This finds a wrong name before any process is ended.
        return new

    def _check_can_be_offline(self) -> None:
        if "none" not in self.runtimes.isolation.networks:
            raise Refused("not_implemented", "slots without network need the mode bwrap, not %s" % self.runtimes.isolation.name)

    async def _change_rights(self, has_network: bool, cache: CacheFolder | None, new_read_only: Sequence[str] = ()) -> None:
        slot, epoch = self.slot, self.slot.epoch
        lease, previous_cache = slot.lease, slot.lease.cache
        lease.cache = cache
        slot.set_state(RESETTING)
        slot.lease.end_calls_and_jobs()  # after the change of state: when a call ends, the next one of its stream must not start in the old runtime
        async with self.exchange_lock:
            if slot.epoch != epoch:
                raise Refused("stale_epoch", "slot %s was given back meanwhile" % slot.slot_id)
            proof = await self.replace_runtime(has_network, True, cache, new_read_only)
            refused = proof.get("refused")
            if refused is not None:
                lease.cache = previous_cache
            answer = self.apply_proof(epoch, proof, 0.0)
        if answer["state"] != READY:
            raise Refused("slot_unavailable", "the slot could not be started again: %s" % answer["detail"])
        if refused is not None:
            raise refused
