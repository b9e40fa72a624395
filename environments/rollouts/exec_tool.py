"""What the hooks of an environment use to run tool calls in the slot of a trajectory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeVar

from env_client import AsyncLease, ClientClosed, ExecutionResult, InvalidRequest, LeaseInfo, NotImplementedYet, Reason, SandboxError, SlotTools
from env_client.tools import CallExecutor

V = TypeVar("V")

#: Errors that are raised as they are: mistakes in a hook, the end of the environment, and what the service does not offer.
_NOT_INFRA = (InvalidRequest, ClientClosed, NotImplementedYet)
#: Ends of a call after which nothing is known about what it did.
_UNKNOWN_ENDS = frozenset({Reason.LEASE_LOST, Reason.SANDBOX_LOST, Reason.BACKEND_ERROR, Reason.CANCELLED})
#: The timeout of a model's call. `ExecTool` runs no such calls; `SlotTools` needs a value.
_UNUSED_TIMEOUT_S = 1.0


class RolloutFault(Exception):
    """A rollout failed through no fault of the model: nothing is known about it, so it must not be scored. A hook must not catch this.

    Args:
        message: one sentence that says what happened.
        reason: how the call ended, such as `sandbox_lost`, or the code of the error.
        fault: who is to blame: `infra` or `ambiguous`.
    """

    def __init__(self, message: str, *, reason: str, fault: str = "infra") -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.fault = fault

    @classmethod
    def from_error(cls, error: SandboxError) -> RolloutFault:
        """Create the fault for an error of the client."""
        return cls(error.detail, reason=error.code)


class RunEndingFault(RolloutFault):
    """A rollout failed through no fault of the model, and so would every other one: the run must end."""


class ExecTool:
    """Runs tool calls of hooks in the slot of one trajectory.

    Args:
        lease: the lease of the slot. The environment renews and releases it.
        executor: runs the calls.
        acquire_slot: acquires another slot of the same pool for the duration of an `async with` block.
    """

    def __init__(self, lease: AsyncLease, executor: CallExecutor, acquire_slot: Callable[[], AbstractAsyncContextManager[AsyncLease]]) -> None:
        self.lease = lease
        #: How calls ended whose fault is `ambiguous`. The environment decides whether the rollout is scored all the same.
        self.ambiguous_reasons: list[str] = []
        #: Whether the entries that the environment wanted to seal are read-only. False if the isolation mode of the slot cannot do that.
        self.sealed = False
        self._executor = executor
        self._acquire_slot = acquire_slot
        self._tools = SlotTools(lease, executor, timeout_s=_UNUSED_TIMEOUT_S)

    async def __call__(self, tool: str, args: Mapping[str, Any], timeout: float | None = 300) -> ExecutionResult:
        """Run one tool call.

        Args:
            tool: any tool of the service, such as `terminal` or `write_file`.
            args: its arguments.
            timeout: the timeout, in seconds; at most the `max_timeout_s` of the pool. None: the default of the pool.

        Returns:
            The result. Its fault is `none`, `policy` or `ambiguous`.

        Raises:
            RolloutFault: the call failed through no fault of the model, or the slot was lost.
            InvalidRequest: there is no such tool, or the timeout is not valid.
        """
        result = await _or_fault(self._tools.exec_tool(tool, args, timeout))
        if result.fault == "infra" or (result.reason in _UNKNOWN_ENDS and result.fault != "policy"):
            raise RolloutFault(f"{tool}: {result.error}", reason=result.reason, fault="ambiguous" if result.fault == "ambiguous" else "infra")
        if result.fault == "ambiguous":
            self.ambiguous_reasons.append(result.reason)
        return result

    async def narrow(self, *, allow_network: bool | None = None, cache: str | None = None, read_only: Sequence[str] = ()) -> LeaseInfo:
        """Take rights away from the slot, for good. Its processes end, and its files stay.

        Args:
            allow_network: False takes the network away.
            cache: `none` takes the set-up cache away.
            read_only: names at the top of the workspace that can no longer be changed.

        Raises:
            NotImplementedYet: the isolation mode of the slot cannot make entries read-only.
            RolloutFault: the slot could not be narrowed.
            InvalidRequest: a name is not that of an entry at the top of the workspace.
        """
        # Without entries the argument is left out, so that services that do not know it yet narrow all the same.
        options: dict[str, Any] = {"read_only": list(read_only)} if read_only else {}
        return await _or_fault(self.lease.narrow(allow_network=allow_network, cache=cache, **options))

    @asynccontextmanager
    async def fresh_slot(self) -> AsyncIterator[ExecTool]:
        """Acquire another slot of the same pool, with the set-up cache and an `ExecTool` of its own. It is released at the end of the block.

        Raises:
            RolloutFault: no slot could be acquired.
        """
        async with self._acquire_slot() as lease:
            fresh = ExecTool(lease, self._executor, self._acquire_slot)
            fresh.ambiguous_reasons = self.ambiguous_reasons  # of one trajectory
            yield fresh


async def _or_fault(request: Awaitable[V]) -> V:
    """Wait for a request to the service, and raise its failure as a `RolloutFault`."""
    try:
        return await request
    except _NOT_INFRA:
        raise
    except SandboxError as error:
        raise RolloutFault.from_error(error) from error
