"""Whether and when to send a request again: one pure decision, taken by both clients."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from env_client.errors import BadAnswer, ConnectFailed, ConnectionLost, SandboxError, ServiceError, TimedOut

#: A proxy answers these when it could not get the service's answer.
PROXY_STATUSES = frozenset({502, 503, 504})
#: Answers of the service itself that pass by themselves. `no_capacity` is not one: it has queued as long as it was asked to.
PASSING_CODES = frozenset({"backend_unavailable", "storage_unavailable"})
#: Limits of what goes on at once: a `quota_exceeded` that names one passes as soon as something has ended, without anybody giving anything up.
PASSING_LIMITS = frozenset({"calls_in_flight", "max_running_calls", "max_waiters", "streams", "waiters"})


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """How patient a client is. All in seconds.

    Args:
        total_s: how long one request may be repeated, on top of the time its answer may rightly take; 0: never repeat.
        base_s: the first delay, doubled each time, with jitter between half of it and all.
        cap_s: the longest delay of our own; the service's `Retry-After` may ask for more.
        first_connect_s: how long a service that has never answered this client is tried for: more likely its address is wrong than that it restarts.
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
        case ConnectionLost() | TimedOut():
            return repeatable
        case BadAnswer():
            return repeatable and error.status in PROXY_STATUSES
        case ServiceError():
            passes = error.code in PASSING_CODES or (error.code == "quota_exceeded" and error.extra.get("limit") in PASSING_LIMITS)
            return repeatable and passes and error.code not in final_codes
        case _:
            return False


def next_delay_s(policy: RetryPolicy, *, attempt: int, error: SandboxError, elapsed_s: float, budget_s: float, unit: float) -> float | None:
    """How long to wait before the next attempt.

    Args:
        policy: the client's patience.
        attempt: 0 after the first attempt, and so on.
        error: one that `may_retry`.
        elapsed_s: since the first attempt began.
        budget_s: how long all attempts together may take.
        unit: a random number from 0 to 1, for the jitter.

    Returns:
        Seconds, or None when the budget would be spent before the next attempt began.
    """
    delay_s = min(policy.cap_s, policy.base_s * 2.0 ** min(attempt, 30)) * (0.5 + unit / 2)
    if error.retry_after_s is not None:
        delay_s = max(delay_s, error.retry_after_s)
    return delay_s if elapsed_s + delay_s < budget_s else None
