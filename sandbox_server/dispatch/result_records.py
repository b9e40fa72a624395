"""The results that are recorded: how a call is identified, what is stored, and how a stored result is found again."""

from __future__ import annotations

import hashlib
import logging
from typing import Protocol

import orjson

from sandbox_server.core.errors import StorageUnavailable
from sandbox_server.core.execution import NOT_RECORDED, Reason, Result, ToolCall
from sandbox_server.dispatch.call_tracker import CallTracker
from sandbox_server.dispatch.outputs import ResultOutputs
from sandbox_server.dispatch.results import agent_result, call_reference, service_result
from sandbox_server.dispatch.slot_locator import SlotLocation
from sandbox_server.link.call_messages import ResultMessage
from sandbox_server.store.base import RecordedResult
from sandbox_server.store.output_files import OutputFiles

log = logging.getLogger(__name__)


class ResultStore(Protocol):
    """Where results are recorded. A `store.base.Store` is one."""

    @property
    def outputs(self) -> OutputFiles: ...

    def record_result(self, lease_id: str, call_id: str, identity: bytes, result: Result) -> None: ...

    def find_result(self, lease_id: str, call_id: str) -> RecordedResult | None: ...

    def result_count(self, lease_id: str) -> int: ...

    async def flush(self) -> None: ...


def identity_of(call: ToolCall) -> bytes:
    """What makes two calls with the same id the same call: the tool and its arguments."""
    return hashlib.sha256(call.tool.encode() + b"\0" + orjson.dumps(call.args, option=orjson.OPT_SORT_KEYS)).digest()


def put_result(result_store: ResultStore, call: ToolCall, result: Result) -> None:
    """Queue the result of a call for the store."""
    result_store.record_result(call.lease_id, call.call_id, identity_of(call), result)


async def record_result(result_store: ResultStore, call: ToolCall, result: Result) -> None:
    """Record the result of a call, if its reason is one that is recorded, and wait until it is stored.

    A result that cannot be stored is still given to the client: the agent's journal has it, so that the same call returns it again.
    """
    if result.reason in NOT_RECORDED:
        return
    put_result(result_store, call, result)
    try:
        await result_store.flush()
    except StorageUnavailable:
        log.exception("a result could not be stored", extra={"lease_id": call.lease_id, "call_id": call.call_id})


def find_result(result_store: ResultStore, call: ToolCall) -> Result | None:
    """The recorded result of a call that is sent again; `call_conflict` where the record is of another call with this id; None where there is no record.

    Raises:
        StorageUnavailable: the record cannot be read.
    """
    recorded_result = result_store.find_result(call.lease_id, call.call_id)
    if recorded_result is None:
        return None
    if recorded_result.identity != identity_of(call):
        return service_result(call, Reason.CALL_CONFLICT, f"call_id {call.call_id} was used before with another tool or other arguments")
    return recorded_result.result


class ResultLookup:
    """Finds the results and encodings of calls that are known only by their ids.

    Args:
        result_store: where results are recorded.
        call_tracker: the calls in flight.
        outputs: fetches the outputs of results.
    """

    def __init__(self, result_store: ResultStore, call_tracker: CallTracker, outputs: ResultOutputs) -> None:
        self._result_store = result_store
        self._call_tracker = call_tracker
        self._outputs = outputs

    def recorded_result(self, lease_id: str, call_id: str) -> Result | None:
        """The recorded result of a call; None where there is none."""
        recorded_result = self._result_store.find_result(lease_id, call_id)
        return recorded_result.result if recorded_result is not None else None

    def known_encoding(self, lease_id: str, call_id: str) -> str | None:
        """The encoding that a call asked for; None where this process does not know the call."""
        call = self.recorded_result(lease_id, call_id) or self._call_tracker.find_call(lease_id, call_id)
        return call.encoding if call is not None else None

    async def result_of_message(self, location: SlotLocation, call_id: str, message: ResultMessage) -> Result:
        """The result of a call that has ended, as its agent reports it.

        Where the result is recorded, or about to be, the record is returned, so that its output is not fetched a second time.

        Args:
            location: the slot of the call.
            call_id: the call.
            message: the agent's message.

        Raises:
            LinkLost, AgentSilent: the output could not be fetched. The agent still has it.
        """
        lease_id = location.lease.lease_id
        recorded_result = self.recorded_result(lease_id, call_id)
        is_in_flight = self._call_tracker.find_call(lease_id, call_id) is not None
        if recorded_result is None and is_in_flight and message.waiting_sizes_bytes is not None:
            await self._call_tracker.wait_for_result(lease_id, call_id)
            recorded_result = self.recorded_result(lease_id, call_id)
        if recorded_result is not None:
            return recorded_result
        encoding = self.known_encoding(lease_id, call_id) or message.encoding
        result = agent_result(call_reference(lease_id, call_id, encoding), message)
        return await self._outputs.complete_unrecorded_result(result, message, location)
