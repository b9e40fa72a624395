"""Ends what an item has left running, and reads its artifacts, in its slot."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from sandbox_server.core.errors import PoolServiceError
from sandbox_server.core.execution import Reason, ToolCall
from sandbox_server.dispatch.agent_errors import translated_link_errors
from sandbox_server.dispatch.files import FILES_LOST_LINK_WAIT_S, SlotFiles
from sandbox_server.dispatch.results import agent_result
from sandbox_server.dispatch.run_batch.values import Artifact
from sandbox_server.dispatch.slot_locator import SlotLocator

log = logging.getLogger(__name__)

MAX_READS = 8
"""How many items' artifacts are read at once: those of each are in memory until they are written to the results."""
END_WITHIN_S = 10.0
END_PROCESSES = "kill -9 -1"
"""Ends every process of the slot but its init and the shell that runs this. In these modes no process outside the slot can be reached by it."""
MODES_OF_OWN_PROCESSES = frozenset({"bwrap", "uid"})


@dataclass(slots=True)
class ArtifactBudget:
    """How many bytes of artifacts the items of one request may still have.

    Args:
        total_bytes: how many bytes the artifacts of the request may have together.
        item_bytes: how many bytes those of one item may have together.
    """

    total_bytes: int
    item_bytes: int
    left_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.left_bytes = self.total_bytes


class ArtifactReader:
    """Reads the artifacts of items.

    Args:
        slot_locator: finds the slot of a lease.
        files: reads files of slots.
    """

    def __init__(self, slot_locator: SlotLocator, files: SlotFiles) -> None:
        self.permits = asyncio.Semaphore(MAX_READS)
        self._slot_locator = slot_locator
        self._files = files

    async def read_artifacts(self, tenant: str, lease_id: str, paths: Sequence[str], budget: ArtifactBudget) -> Mapping[str, Artifact]:
        """End the processes that an item has left in its slot, then read its artifacts. What cannot be read says why.

        Args:
            tenant: the tenant of the lease.
            lease_id: the lease of the item's slot.
            paths: the files.
            budget: how large they may be; it is charged.
        """
        try:
            await self._end_processes(tenant, lease_id)
        except PoolServiceError as error:
            return dict.fromkeys(paths, Artifact(code=error.code, error=error.detail))
        artifacts: dict[str, Artifact] = {}
        item_left_bytes = budget.item_bytes
        for path in paths:
            artifact = await self._read_artifact(tenant, lease_id, path, item_left_bytes, budget)
            artifacts[path] = artifact
            item_left_bytes -= len(artifact.content or b"")
        return artifacts

    async def _end_processes(self, tenant: str, lease_id: str) -> None:
        location = self._slot_locator.locate_slot(tenant, lease_id)
        if location.lease.isolation not in MODES_OF_OWN_PROCESSES:
            return  # Nothing separates the processes of the slot from others, so that only the reset of the slot ends them.
        call = ToolCall(call_id="end-processes", lease_id=lease_id, tool="bash", args={"command": END_PROCESSES})
        async with translated_link_errors(self._slot_locator, tenant, lease_id, wait_s=FILES_LOST_LINK_WAIT_S), location.slot.open_calls() as stream:
            stream.send_call(call, END_WITHIN_S)
            stream.end_calls()
            message = await stream.next_result()
        if message is None or agent_result(call, message).reason is not Reason.EXIT:
            log.warning("the processes of an item were not all ended before its artifacts are read", extra={"lease_id": lease_id})

    async def _read_artifact(self, tenant: str, lease_id: str, path: str, item_left_bytes: int, budget: ArtifactBudget) -> Artifact:
        content = bytearray()
        try:
            async with aclosing(self._files.read_file(tenant, lease_id, path)) as chunks:
                async for chunk in chunks:
                    content += chunk
                    if len(content) > item_left_bytes:
                        return _too_large(f"the artifacts of the item have more than the {budget.item_bytes} bytes of `limits.run_batch_item_artifact_bytes`")
                    if len(content) > budget.left_bytes:
                        return _too_large(f"the artifacts of all items have more than the {budget.total_bytes} bytes of `limits.run_batch_artifact_bytes`")
        except PoolServiceError as error:
            return Artifact(code=error.code, error=error.detail)
        budget.left_bytes -= len(content)
        return Artifact(content=bytes(content))


def _too_large(why: str) -> Artifact:
    return Artifact(code="payload_too_large", error=f"{why}: write less, or have the limit raised")
