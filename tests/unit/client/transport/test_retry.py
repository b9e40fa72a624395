"""Tests of the rules that decide whether and when a request is sent again."""

from __future__ import annotations

import pytest

from env_client import errors
from env_client.retry import CallUnfinished, RetryPolicy, may_retry, next_delay_s

POLICY = RetryPolicy(total_s=60.0, base_s=0.1, cap_s=5.0)


@pytest.mark.parametrize(
    ("error", "can_resend", "expected"),
    [
        (errors.ConnectFailed(), False, True),
        (errors.ConnectionLost(), True, True),
        (errors.ConnectionLost(), False, False),
        (errors.TimedOut(), True, True),
        (errors.TimedOut(), False, False),
        (errors.BadAnswer(status=502), True, True),
        (errors.BadAnswer(status=503), True, True),
        (errors.BadAnswer(status=504), True, True),
        (errors.BadAnswer(status=502), False, False),
        (errors.BadAnswer(status=500), True, False),
        (errors.BadAnswer(status=200), True, False),
        (errors.BackendUnavailable(status=503), True, True),
        (errors.StorageUnavailable(status=503), True, True),
        (errors.StorageUnavailable(status=503), False, False),
        (errors.NoCapacity(status=503), True, False),
        (errors.Draining(status=503), True, False),
        (errors.Draining(status=503, extra={"stopping": True}), True, True),
        (errors.Draining(status=503, extra={"stopping": True}), False, False),
        (CallUnfinished(), True, True),
        (CallUnfinished(), False, False),
        (errors.ClientClosed(), True, False),
        (errors.QuotaExceeded(status=429), True, False),
        (errors.QuotaExceeded(status=429, extra={"limit": "max_running_calls"}), True, True),
        (errors.QuotaExceeded(status=429, extra={"limit": "max_running_calls"}), False, False),
        (errors.QuotaExceeded(status=429, extra={"limit": "max_waiters"}), True, True),
        (errors.QuotaExceeded(status=429, extra={"limit": "calls_in_flight"}), True, True),
        (errors.QuotaExceeded(status=429, extra={"limit": "max_leases"}), True, False),
        (errors.QuotaExceeded(status=429, extra={"limit": "lease_calls"}), True, False),
        (errors.InternalError(status=500), True, False),
        (errors.InvalidRequest(status=422), True, False),
        (errors.ServiceNotFound(), True, False),
    ],
)
def test_which_errors_are_retried(error: errors.SandboxError, can_resend: bool, expected: bool) -> None:
    assert expected is may_retry(error, can_resend=can_resend)


def test_a_final_code_is_not_retried() -> None:
    assert not may_retry(errors.BackendUnavailable(status=503), can_resend=True, final_codes={"backend_unavailable"})


def delay(attempt: int, *, jitter: float = 1.0, elapsed_s: float = 0.0, error: errors.SandboxError | None = None) -> float | None:
    return next_delay_s(POLICY, attempt=attempt, error=error or errors.ConnectFailed(), elapsed_s=elapsed_s, budget_s=60.0, jitter=jitter)


def test_delays_double_up_to_the_cap() -> None:
    assert pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]) == [delay(attempt) for attempt in range(8)]
    assert delay(10_000) == 5.0


def test_jitter_takes_off_up_to_half() -> None:
    assert pytest.approx(0.05) == delay(0, jitter=0.0)
    assert pytest.approx(0.075) == delay(0, jitter=0.5)


def test_retry_after_of_the_service_lengthens_the_delay() -> None:
    assert delay(0, error=errors.StorageUnavailable(retry_after_s=7.0)) == 7.0
    assert pytest.approx(0.4) == delay(2, error=errors.StorageUnavailable(retry_after_s=0.0))


def test_gives_up_when_the_budget_would_be_spent() -> None:
    assert delay(9, elapsed_s=54.9) == 5.0
    assert delay(9, elapsed_s=55.0) is None
    assert delay(0, error=errors.StorageUnavailable(retry_after_s=60.0)) is None
