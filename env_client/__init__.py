"""The client of the sandbox pool: acquire a slot, run tool calls in it, release it.

`with SandboxClient() as client, client.lease() as lease: print(lease.bash("echo hello").output)`. `AsyncSandboxClient` has the same methods for asyncio.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from env_client._version import __version__

if TYPE_CHECKING:
    from env_client.backend import ExecutionResult, RemoteToolBackend, Slot
    from env_client.client import AsyncSandboxClient, SandboxClient
    from env_client.discovery import Endpoint, find_service
    from env_client.embedded_service import EmbeddedService, embedded
    from env_client.errors import (
        BackendUnavailable,
        BadAnswer,
        CallConflict,
        CallNotFound,
        ClientClosed,
        ConnectFailed,
        ConnectionLost,
        Draining,
        EmbeddedFailed,
        FileError,
        FileNotFound,
        Forbidden,
        InternalError,
        InvalidRequest,
        LeaseLost,
        LeaseNotFound,
        MethodNotAllowed,
        NoCapacity,
        NotImplementedYet,
        PayloadTooLarge,
        PoolConflict,
        PoolNotFound,
        PortClosed,
        QuotaExceeded,
        RouteNotFound,
        SandboxError,
        SandboxLost,
        SandboxNotFound,
        ServiceError,
        ServiceNotFound,
        StorageUnavailable,
        TimedOut,
        TransportError,
        Unauthorized,
    )
    from env_client.gatherer import CallGatherer, GathererStatistics
    from env_client.leases import AsyncLease, Lease
    from env_client.messages.ports import PortAddress
    from env_client.messages.programs import Artifact, Program, ProgramResult
    from env_client.retry import RetryPolicy
    from env_client.tools import SlotTools, available_tools, render_tool_reply, tool_schemas
    from env_client.values import (
        Acquired,
        AcquireOptions,
        Call,
        CallOptions,
        CallStatus,
        Event,
        Fault,
        FileEntry,
        LeaseInfo,
        LeasePage,
        Output,
        Page,
        PoolChange,
        PoolInfo,
        Readiness,
        Reason,
        Released,
        Renewed,
        Result,
        SandboxInfo,
        SlotCheck,
        VerifyReport,
    )

__all__ = [
    "AcquireOptions",
    "Acquired",
    "Artifact",
    "AsyncLease",
    "AsyncSandboxClient",
    "BackendUnavailable",
    "BadAnswer",
    "Call",
    "CallConflict",
    "CallGatherer",
    "CallNotFound",
    "CallOptions",
    "CallStatus",
    "ClientClosed",
    "ConnectFailed",
    "ConnectionLost",
    "Draining",
    "EmbeddedFailed",
    "EmbeddedService",
    "Endpoint",
    "Event",
    "ExecutionResult",
    "Fault",
    "FileEntry",
    "FileError",
    "FileNotFound",
    "Forbidden",
    "GathererStatistics",
    "InternalError",
    "InvalidRequest",
    "Lease",
    "LeaseInfo",
    "LeaseLost",
    "LeaseNotFound",
    "LeasePage",
    "MethodNotAllowed",
    "NoCapacity",
    "NotImplementedYet",
    "Output",
    "Page",
    "PayloadTooLarge",
    "PoolChange",
    "PoolConflict",
    "PoolInfo",
    "PoolNotFound",
    "PortAddress",
    "PortClosed",
    "Program",
    "ProgramResult",
    "QuotaExceeded",
    "Readiness",
    "Reason",
    "Released",
    "RemoteToolBackend",
    "Renewed",
    "Result",
    "RetryPolicy",
    "RouteNotFound",
    "SandboxClient",
    "SandboxError",
    "SandboxInfo",
    "SandboxLost",
    "SandboxNotFound",
    "ServiceError",
    "ServiceNotFound",
    "Slot",
    "SlotCheck",
    "SlotTools",
    "StorageUnavailable",
    "TimedOut",
    "TransportError",
    "Unauthorized",
    "VerifyReport",
    "__version__",
    "available_tools",
    "embedded",
    "find_service",
    "render_tool_reply",
    "tool_schemas",
]

#: The modules that define the public names.
_MODULES = (
    "backend",
    "client",
    "discovery",
    "embedded_service",
    "errors",
    "gatherer",
    "leases",
    "messages.ports",
    "messages.programs",
    "retry",
    "tools",
    "values",
)


def __getattr__(name: str) -> Any:
    """Load the public names at the first use of one of them.

    Until then, importing the package is cheap. The command line installs its handler for Ctrl-C before it loads the modules that use HTTP.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for module in _MODULES:
        members = vars(import_module(f"{__name__}.{module}"))
        globals().update({public: members[public] for public in __all__ if public in members})
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
