"""The retry policy of the clients, and the rules that decide whether and when a request is sent again. Nothing here does I/O."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from env_client.errors import BadAnswer, ConnectFailed, ConnectionLost, SandboxError, ServiceError, TimedOut

#: Statuses with which a proxy reports that it could not get a response from the service.
PROXY_ERROR_STATUSES = frozenset({502, 503, 504})
#: Error codes of the service for conditions that pass by themselves. `no_capacity` is not one of them: the acquire was queued as long as requested.
TRANSIENT_CODES = frozenset({"backend_unavailable", "storage_unavailable"})
#: Limits on concurrent work. A `quota_exceeded` error that names one of them passes as soon as other work ends.
TRANSIENT_LIMITS = frozenset({"calls_in_flight", "max_running_calls", "max_waiters", "run_batches", "streams", "waiters"})


class CallUnfinished(SandboxError):
    """The service stopped before the call ended.

    Internal to the client and never raised to callers. Sending the same call again joins it if it still runs, and runs it if it never started.

    Args:
        value: the response of the stopped service, which is returned to the caller if the retries fail.
    """

    code = "unfinished"

    def __init__(self, value: Any = None) -> None:
        super().__init__()
        self.value = value


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """How long a client repeats a request that gets no response. All fields are in seconds.

    Args:
        total_s: how long one request is repeated while there is no connection, counted from the moment at which the connection was lost or first
            refused; 0 disables retries. The same time is granted again, beyond the time that the response may take, to connections that are open
            but deliver nothing.
        base_s: the first delay. Each further delay is twice as long; a random part of up to half is taken off (jitter).
        cap_s: the longest delay that the client chooses itself. A `Retry-After` of the service may ask for a longer one.
        first_connect_s: the limit that replaces `total_s` until the client has connected once: a wrong address is then more likely than a restart of
            the service.
    """

    total_s: float = 60.0
    base_s: float = 0.1
    cap_s: float = 5.0
    first_connect_s: float = 10.0


def may_retry(error: SandboxError, *, can_resend: bool, final_codes: Collection[str] = ()) -> bool:
    """Return whether sending the same request again is safe and may succeed.

    Args:
        error: the error of the last attempt.
        can_resend: whether the content of the request can be read again from its beginning.
        final_codes: error codes that are the result of this request and must not be retried.
    """
    match error:
        case ConnectFailed():
            return True
        case ConnectionLost() | TimedOut() | CallUnfinished():
            return can_resend
        case BadAnswer():
            return can_resend and error.status in PROXY_ERROR_STATUSES
        case ServiceError():
            return can_resend and _is_transient(error) and error.code not in final_codes
        case _:
            return False


def _is_transient(error: ServiceError) -> bool:
    """Return whether the service may accept the same request soon. It does after its own restart, but a pool that drains stays closed."""
    match error.code:
        case "quota_exceeded":
            return error.extra.get("limit") in TRANSIENT_LIMITS
        case "draining":
            return error.extra.get("stopping") is True
        case code:
            return code in TRANSIENT_CODES


def next_delay_s(policy: RetryPolicy, *, attempt: int, error: SandboxError, elapsed_s: float, budget_s: float, jitter: float) -> float | None:
    """Return how long to wait before the next attempt, in seconds; None if the budget would end before that attempt.

    Args:
        policy: the retry policy of the client.
        attempt: the number of retries so far.
        error: the error of the last attempt, for which `may_retry` is true.
        elapsed_s: how much of the budget is used, in seconds.
        budget_s: how long all attempts together may take, in seconds.
        jitter: a random number from 0 to 1.
    """
    delay_s = min(policy.cap_s, policy.base_s * 2.0 ** min(attempt, 30)) * (0.5 + jitter / 2)
    if error.retry_after_s is not None:
        delay_s = max(delay_s, error.retry_after_s)
    return delay_s if elapsed_s + delay_s < budget_s else None
