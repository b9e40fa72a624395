"""All run-batches of the service: those that run, and the results that are kept for repeated requests."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from weakref import WeakValueDictionary

from sandbox_server.core.cleanup import cleanup_on_failure
from sandbox_server.core.clock import Clock
from sandbox_server.core.errors import LeaseLost, QuotaExceeded, StorageUnavailable
from sandbox_server.core.types import AcquireRequest, PoolView
from sandbox_server.dispatch.dispatcher import Dispatcher
from sandbox_server.dispatch.files import SlotFiles
from sandbox_server.dispatch.limits.room_queue import TENANT_SHARE
from sandbox_server.dispatch.run_batch.artifact_reader import ArtifactBudget
from sandbox_server.dispatch.run_batch.batch import BatchContext, RunBatch
from sandbox_server.dispatch.run_batch.item_runner import ItemRunner
from sandbox_server.dispatch.run_batch.item_slots import LeasePools
from sandbox_server.dispatch.run_batch.kept_results import KEPT_S, KeptResults, new_batch_id
from sandbox_server.dispatch.run_batch.program_spool import ProgramSpool
from sandbox_server.dispatch.run_batch.result_log import Follower, ResultLog
from sandbox_server.dispatch.run_batch.values import RenderItem, RunBatchRequest
from sandbox_server.dispatch.slot_locator import SlotLocator
from sandbox_server.pool.access import Actor
from sandbox_server.pool.leasing import rights
from sandbox_server.store.base import Deletion, RunBatchItemRecord, RunBatchRecord, State, Store

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunBatchLimits:
    """The limits of run-batches, by the names of the settings.

    Args:
        at_once: how many requests there may be at once (`limits.run_batches`); those of one tenant are at most half as many.
        artifact_bytes: how large the artifacts of one request may be (`limits.run_batch_artifact_bytes`).
        item_artifact_bytes: how large the artifacts of one item may be (`limits.run_batch_item_artifact_bytes`).
        kept_bytes: how much room the results take that are kept for repeated requests (`limits.run_batch_kept_bytes`).
    """

    at_once: int
    artifact_bytes: int
    item_artifact_bytes: int
    kept_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RunBatchDependencies:
    """What run-batches are made of.

    Args:
        pools: leases slots.
        slot_locator: finds the slot of a lease.
        dispatcher: runs calls.
        files: writes and reads files of slots.
        store: keeps records.
        clock: gives the time.
        folder: the folder of programs and results.
        render: makes the line of a result.
        limits: the limits.
    """

    pools: LeasePools
    slot_locator: SlotLocator
    dispatcher: Dispatcher
    files: SlotFiles
    store: Store
    clock: Clock
    folder: Path
    render: RenderItem
    limits: RunBatchLimits


class RunBatches:
    """All run-batches of the service.

    Args:
        dependencies: what they are made of.
    """

    def __init__(self, dependencies: RunBatchDependencies) -> None:
        self._dependencies = dependencies
        self._kept = KeptResults(dependencies.store, dependencies.clock, dependencies.folder, dependencies.limits.kept_bytes)
        self._active: dict[str, RunBatch] = {}
        self._opening: Counter[str] = Counter()
        self._request_counts: Counter[str] = Counter()
        self._locks: WeakValueDictionary[tuple[str, str | None], asyncio.Lock] = WeakValueDictionary()
        self._purge_timer: asyncio.TimerHandle | None = None
        self._context = BatchContext(
            pools=dependencies.pools,
            runner=ItemRunner(dependencies.slot_locator, dependencies.dispatcher, dependencies.files, dependencies.clock),
            store=dependencies.store,
            clock=dependencies.clock,
            render=dependencies.render,
            report_growth=self._check_room,
            report_unwritten=self._stop_keeping,
            report_idle=self._close_batch,
        )

    # Start and stop.

    async def start(self, state: State) -> None:
        """Take over the run-batches that an earlier process has recorded: items whose programs run are finished, the slots of others are given back.

        Args:
            state: the records. The pools must have taken over theirs.
        """
        self._kept.restore(state.run_batches)
        for item in state.run_batch_items:
            record = self._kept.get(item.batch_id)
            if record is None or record.is_evicted or item.call is None:
                self._give_back(item)
                continue
            try:
                batch = self._active.get(item.batch_id) or await self._open_kept_batch(record)
            except (StorageUnavailable, LeaseLost) as error:
                log.error("an item of a run-batch cannot be finished: %s", error.detail, extra={"batch_id": item.batch_id})
                self._kept.evict(item.batch_id)  # its program may have run, and must not run again when the request is repeated
                self._give_back(item)
                continue
            if batch.has_result(item.index):
                self._give_back(item)
            else:
                batch.resume_item(item)
        for batch in list(self._active.values()):
            if batch.is_idle:
                self._close_batch(batch)
        self._purge()

    def _give_back(self, item: RunBatchItemRecord) -> None:
        self._dependencies.pools.release(item.tenant, lease_ids=[item.lease_id])
        self._dependencies.store.put(Deletion(run_batch_item=item.key))

    def begin_stop(self) -> None:
        """Let no item begin any more, because the service stops."""
        for batch in list(self._active.values()):
            batch.begin_stop()

    async def stop(self) -> None:
        """End the items that still run. Those of requests that can be repeated are finished by the next process of the service."""
        await asyncio.gather(*(batch.stop() for batch in list(self._active.values())))

    async def close(self) -> None:
        """Close every file. To be called when no request is left."""
        for batch in list(self._active.values()):
            self._close_batch(batch)
        if self._purge_timer is not None:
            self._purge_timer.cancel()
        await asyncio.to_thread(self._kept.close)

    # Requests.

    @contextmanager
    def admit(self, tenant: str) -> Iterator[None]:
        """Count one request of a tenant for the duration of a `with` block.

        Raises:
            QuotaExceeded: there are too many at once, of all tenants or of this one.
        """
        most = self._dependencies.limits.at_once
        most_of_tenant = max(1, int(most * TENANT_SHARE))
        if self._request_counts.total() >= most or self._request_counts[tenant] >= most_of_tenant:
            full = f"more than {most} run-batches at once, of which one tenant may have {most_of_tenant}: that is `limits.run_batches`"
            raise QuotaExceeded(f"{full}; try again later", limit="run_batches", retry_after_s=5)
        self._request_counts[tenant] += 1
        try:
            yield
        finally:
            self._request_counts[tenant] -= 1
            if not self._request_counts[tenant]:
                del self._request_counts[tenant]

    def new_spool(self, request: RunBatchRequest) -> ProgramSpool:
        """A place for the programs of a request. Its user closes it, unless it is given to `follow`."""
        return ProgramSpool(self._dependencies.folder, request)

    def view_pool(self, request: RunBatchRequest) -> PoolView:
        """The pool of a request.

        Raises:
            PoolNotFound: there is no such pool.
        """
        return self._dependencies.pools.view(request.pool, actor=Actor(tenant=request.tenant))

    def check_rights(self, request: RunBatchRequest, view: PoolView, allow_network: bool | None) -> None:
        """Check that the slots of a pool can have the rights that an item asks for.

        Raises:
            InvalidRequest, NotImplementedHere: they cannot.
        """
        wanted = AcquireRequest(tenant=request.tenant, pool=request.pool, allow_network=allow_network)
        rights.check_possible(wanted, view.spec, view.capabilities)

    async def follow(self, request: RunBatchRequest, spool: ProgramSpool, view: PoolView, *, reads_at_end: bool) -> tuple[RunBatch, Follower]:
        """Start a run-batch, or join the one that the request repeats. The caller calls `detach` of the run-batch in the end.

        Args:
            request: the request.
            spool: its programs, finished; it belongs to the run-batch from now on.
            view: the pool.
            reads_at_end: whether the results are read when all are there.

        Raises:
            CallConflict: the `request_key` was used with another body.
            LeaseLost: the results of the `request_key` are not kept any more.
            StorageUnavailable: the state cannot be written.
        """
        self._purge()
        with cleanup_on_failure(spool.close):
            if request.request_key is None:
                batch_id = new_batch_id()
                batch = self._add_batch(batch_id, request.tenant, request.run_id or batch_id, None)
                return batch, batch.attach(request, spool, self._max_parallel(request, view), reads_at_end=reads_at_end)
            async with self._locks.setdefault((request.tenant, request.request_key), asyncio.Lock()):
                batch = await self._keyed_batch(request, spool.digest)
                return batch, batch.attach(request, spool, self._max_parallel(request, view), reads_at_end=reads_at_end)

    async def _keyed_batch(self, request: RunBatchRequest, digest: str) -> RunBatch:
        record = self._kept.find(request, digest)
        if record is None:
            record = self._kept.add(request, digest)
            with cleanup_on_failure(lambda: self._kept.forget(record.batch_id)), self._in_use(record.batch_id):
                await self._dependencies.store.flush()
                return await self._open_kept_batch(record)
        batch = self._active.get(record.batch_id)
        return batch if batch is not None else await self._open_kept_batch(record)

    async def _open_kept_batch(self, record: RunBatchRecord) -> RunBatch:
        """Open the results of a run-batch that is not active.

        Raises:
            StorageUnavailable: they cannot be opened.
            LeaseLost: they were evicted meanwhile.
        """
        results = ResultLog(self._dependencies.folder, self._kept.path_of(record.batch_id))
        with self._in_use(record.batch_id):
            await results.open_kept()
            with cleanup_on_failure(results.close):
                # While the file was opened, the run may have been released, and the results evicted.
                used = self._kept.begin_use(record.batch_id)
            return self._add_batch(used.batch_id, used.tenant, used.run_id, used, results)

    def _add_batch(self, batch_id: str, tenant: str, run_id: str | None, record: RunBatchRecord | None, results: ResultLog | None = None) -> RunBatch:
        limits = self._dependencies.limits
        budget = ArtifactBudget(total_bytes=limits.artifact_bytes, item_bytes=limits.item_artifact_bytes)
        if results is None:
            results = ResultLog(self._dependencies.folder, None)
        batch = self._active[batch_id] = RunBatch(self._context, batch_id, tenant, run_id, record, results, budget)
        return batch

    def _max_parallel(self, request: RunBatchRequest, view: PoolView) -> int:
        """How many items may have a slot at once: as many as the request says, or half of what the pool can have, but not more than may run."""
        most = view.spec.max_slots
        wanted = request.max_parallel if request.max_parallel is not None else max(1, most // 2)
        running = self._dependencies.dispatcher.concurrency_limiter.limit_of_tenant(request.tenant)
        return max(1, min(wanted, most, most if running is None else running))

    def cancel_run(self, tenant: str, run_id: str) -> None:
        """Let no item of a run begin any more, because the run is released. The items that run end with their leases."""
        for record in self._kept.of_run(tenant, run_id):
            if record.batch_id not in self._active and not record.is_cancelled:
                self._kept.update(replace(record, is_cancelled=True))
        for batch in list(self._active.values()):
            if batch.tenant == tenant and batch.run_id == run_id:
                batch.cancel()
                if batch.record is not None:
                    self._kept.update(batch.record)

    # What is kept.

    @contextmanager
    def _in_use(self, batch_id: str) -> Iterator[None]:
        """Count a run-batch as in use while it becomes active, so that it does not make room for others."""
        self._opening[batch_id] += 1
        try:
            yield
        finally:
            self._opening[batch_id] -= 1
            if not self._opening[batch_id]:
                del self._opening[batch_id]

    def _is_in_use(self, batch_id: str) -> bool:
        return batch_id in self._active or batch_id in self._opening

    def _check_room(self, batch: RunBatch) -> None:
        for batch_id in self._kept.make_room(batch.batch_id, batch.results.kept_bytes, self._is_in_use):
            evicted = self._active.get(batch_id)
            if evicted is not None:
                log.warning("the results of a run-batch are larger than what may be kept for a repeated request", extra={"batch_id": batch_id})
                evicted.stop_keeping()

    def _stop_keeping(self, batch: RunBatch) -> None:
        """Refuse repeats of a request from now on, because they cannot get its results, and its programs must not run again."""
        batch.stop_keeping()
        self._kept.evict(batch.batch_id)

    def _close_batch(self, batch: RunBatch) -> None:
        if self._active.pop(batch.batch_id, None) is None:
            return
        batch.results.close()
        if batch.record is None:
            return
        if batch.error is not None and not batch.results.lines:
            self._kept.forget(batch.batch_id)
        else:
            self._kept.end_use(batch.record)
            self._purge()

    def _purge(self) -> None:
        """Delete what was kept for long enough, now and again after as long as it may be kept."""
        self._kept.purge(self._is_in_use)
        if self._purge_timer is not None:
            self._purge_timer.cancel()
        self._purge_timer = asyncio.get_running_loop().call_later(KEPT_S + 1, self._purge)
