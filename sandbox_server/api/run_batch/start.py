"""Makes the run-batches of a service from its parts and its limits."""

from __future__ import annotations

from pathlib import Path

from sandbox_server.api.limits import Limits
from sandbox_server.api.result_pieces import item_pieces
from sandbox_server.core.clock import Clock
from sandbox_server.dispatch.dispatcher import Dispatcher
from sandbox_server.dispatch.files import SlotFiles
from sandbox_server.dispatch.run_batch.registry import RunBatchDependencies, RunBatches, RunBatchLimits
from sandbox_server.pool.service import PoolService
from sandbox_server.store.base import Store

FOLDER = "run-batches"
"""The folder of programs and results, in the state folder."""


async def start_run_batches(pools: PoolService, dispatcher: Dispatcher, store: Store, clock: Clock, state_path: Path, named: Limits) -> RunBatches:
    """Make the run-batches of a service, and finish what an earlier process has left.

    Args:
        pools: the pools, which have taken over what was recorded.
        dispatcher: runs calls.
        store: keeps records.
        clock: gives the time.
        state_path: the state folder.
        named: the limits.
    """
    limits = RunBatchLimits(
        at_once=named.run_batches,
        artifact_bytes=named.run_batch_artifact_bytes,
        item_artifact_bytes=named.run_batch_item_artifact_bytes,
        kept_bytes=named.run_batch_kept_bytes,
    )
    dependencies = RunBatchDependencies(
        pools=pools,
        slot_locator=pools,
        dispatcher=dispatcher,
        files=SlotFiles(pools),
        store=store,
        clock=clock,
        folder=state_path / FOLDER,
        render=item_pieces,
        limits=limits,
    )
    run_batches = RunBatches(dependencies)
    await run_batches.start(store.load())
    return run_batches
