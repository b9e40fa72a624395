"""Whether and when to send a request again: one pure decision, taken by both clients."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from env_client.errors import BadAnswer, ConnectFailed, ConnectionLost, SandboxError, ServiceError, TimedOut

#: A proxy answers these when it could not get the service's answer.
PROXY_STATUSES = frozenset({502, 503, 504})
#: Answers of the service itself that pass by themselves. `no_capacity` is not one: it has queued as long as it was asked to.
PASSING_CODES = frozenset({"backend_unavailable", "storage_unavailable"})
#: Limits of what goes on at once: a `quota_exceeded` that names one passes as soon as something has ended, without anybody giving anything up.
PASSING_LIMITS = frozenset({"calls_in_flight", "max_running_calls", "max_waiters", "streams", "waiters"})


class Unfinished(SandboxError):
    """The service was told to stop before the call ended; asking again joins the call, or runs it. Never raised to callers.

    Args:
        value: the answer as it is, for when asking again leads nowhere.
    """

    code = "unfinished"

    def __init__(self, value: Any = None) -> None:
        super().__init__()
        self.value = value


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """How patient a client is. All in seconds.

    Args:
        total_s: how long one request is repeated without a connection, from when that was lost or first refused; 0: never repeat. As long again a
            connection may hold on which nothing comes, on top of what the answer may rightly take.
        base_s: the first delay, doubled each time, with jitter between half of it and all.
        cap_s: the longest delay of our own; the service's `Retry-After` may ask for more.
        first_connect_s: how long a client that has never made a connection tries to: more likely the address is wrong than that the service restarts.
    """

    total_s: float = 60.0
    base_s: float = 0.1
    cap_s: float = 5.0
    first_connect_s: float = 10.0


def may_retry(error: SandboxError, *, repeatable: bool, final_codes: Collection[str] = ()) -> bool:
    """Whether sending the same request again is safe and may help.

    Args:
        error: what the last attempt came to.
        repeatable: whether the request may be served twice without harm.
        final_codes: codes that are an answer to this request, not an obstacle.
    """
    match error:
        case ConnectFailed():
            return True
        case ConnectionLost() | TimedOut() | Unfinished():
            return repeatable
        case BadAnswer():
            return repeatable and error.status in PROXY_STATUSES
        case ServiceError():
            return repeatable and _passes(error) and error.code not in final_codes
        case _:
            return False


def _passes(error: ServiceError) -> bool:
    """Whether what the service refuses now it may take in a moment. One that drains to stop is back soon; a pool that drains is not."""
    match error.code:
        case "quota_exceeded":
            return error.extra.get("limit") in PASSING_LIMITS
        case "draining":
            return error.extra.get("stopping") is True
        case code:
            return code in PASSING_CODES


def next_delay_s(policy: RetryPolicy, *, attempt: int, error: SandboxError, elapsed_s: float, budget_s: float, unit: float) -> float | None:
    """How long to wait before the next attempt.

    Args:
        policy: the client's patience.
        attempt: 0 after the first attempt, and so on.
        error: one that `may_retry`.
        elapsed_s: what is spent of the budget.
        budget_s: how long all attempts together may take.
        unit: a random number from 0 to 1, for the jitter.

    Returns:
        Seconds, or None when the budget would be spent before the next attempt began.
    """
    delay_s = min(policy.cap_s, policy.base_s * 2.0 ** min(attempt, 30)) * (0.5 + unit / 2)
    if error.retry_after_s is not None:
        delay_s = max(delay_s, error.retry_after_s)
    return delay_s if elapsed_s + delay_s < budget_s else None
