"""How long a request that gets no response is sent again. The clock is an argument, and the only output is the log."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from env_client.errors import ConnectFailed, Draining, QuotaExceeded, SandboxError, TransportError
from env_client.messages.message import Message
from env_client.retry import CallUnfinished, RetryPolicy, may_retry, next_delay_s

log = logging.getLogger("env_client")

T = TypeVar("T")

#: How long establishing one connection may take, in seconds.
CONNECT_TIMEOUT_S = 10.0
#: A connection that lasted as long was established with a service that works, so the delay after it is the shortest again, in seconds.
_LASTING_CONNECTION_S = 1.0


class ConnectionState:
    """What all senders of one client know about the service. An outage is logged once when it begins and once when it ends.

    Args:
        url: the address of the service.
        clock: returns monotonic seconds.
    """

    def __init__(self, url: str, clock: Callable[[], float]) -> None:
        self._url = url
        self._clock = clock
        self._lock = threading.Lock()
        self._outage_began_s: float | None = None
        #: Whether the client has ever connected to the service.
        self.ever_connected = False
        #: Whether the client was closed.
        self.client_closed = False

    def record_no_response(self, error: SandboxError) -> None:
        """Record that a request got no response; the first one begins an outage."""
        with self._lock:
            outage_begins = self._outage_began_s is None
            if outage_begins:
                self._outage_began_s = self._clock()
        if outage_begins:
            log.warning("no response from %s, retrying: %s", self._url, error)

    def record_response(self) -> None:
        """Record that the service has responded, which ends an outage."""
        self.ever_connected = True
        if self._outage_began_s is None:
            return
        with self._lock:
            began_s, self._outage_began_s = self._outage_began_s, None
        if began_s is not None:
            log.warning("%s responds again after %.1f s", self._url, self._clock() - began_s)


class RetryBudget:
    """The time that one request has left for retries.

    Two times are counted separately. Time without a connection, from the moment at which it was lost or first refused, may reach `total_s` of the
    policy. Time on established connections may reach the response timeout of the message plus `total_s`.

    Args:
        policy: the retry policy of the client.
        state: what the client knows about the service.
        clock: returns monotonic seconds.
        jitter: returns random numbers from 0 to 1.
    """

    def __init__(self, policy: RetryPolicy, state: ConnectionState, clock: Callable[[], float], jitter: Callable[[], float]) -> None:
        self._policy = policy
        self._state = state
        self._clock = clock
        self._jitter = jitter
        self._attempt = 0
        self._disconnected_s = 0.0
        self._connected_s = 0.0
        self._attempt_began_s = clock()
        self._may_have_run = False

    def start_attempt(self) -> None:
        """Start timing an attempt."""
        self._attempt_began_s = self._clock()

    def record_received_bytes(self) -> None:
        """Record that bytes have arrived, which restores the whole budget."""
        self._attempt_began_s, self._disconnected_s, self._connected_s = self._clock(), 0.0, 0.0

    def record_received_item(self) -> None:
        """Record that a complete item has arrived; the next delay is the shortest again."""
        self._attempt = 0

    def delay_before_retry_s(self, message: Message[Any], error: SandboxError, *, can_resend: bool = True) -> float | None:
        """Return how long to wait before the message is sent again, in seconds.

        None means that it must not be sent again. The error then names the calls of the message, and says whether they may have run.

        Args:
            message: the message that was sent.
            error: the error of the attempt.
            can_resend: whether the content of the request can be read again from its beginning.
        """
        self._charge_attempt(error)
        delay_s = self._choose_delay_s(message, error, can_resend)
        if delay_s is None:
            self._add_calls_to_error(message, error)
            return None
        self._log_retry(message, error, delay_s)
        if isinstance(error, QuotaExceeded):
            self._connected_s += delay_s  # the service responds, so waiting for other work to end is part of waiting for the response
        else:
            self._disconnected_s += delay_s
        self._attempt += 1
        return delay_s

    def _charge_attempt(self, error: SandboxError) -> None:
        attempt_s = self._clock() - self._attempt_began_s
        if isinstance(error, ConnectFailed):
            self._disconnected_s += min(attempt_s, CONNECT_TIMEOUT_S)  # the rest of the time was spent waiting for a free connection
            return
        self._state.ever_connected = True
        self._may_have_run = self._may_have_run or isinstance(error, TransportError)
        self._connected_s += attempt_s
        # A connection that lasted long was not part of an outage; one that was cut at once continues the outage.
        self._disconnected_s = max(0.0, self._disconnected_s - attempt_s)
        if attempt_s >= _LASTING_CONNECTION_S:
            self._attempt = 0

    def _choose_delay_s(self, message: Message[Any], error: SandboxError, can_resend: bool) -> float | None:
        policy = self._policy
        if not policy.total_s or not may_retry(error, can_resend=can_resend, final_codes=message.final_codes):
            return None
        if self._connected_s >= message.response_timeout_s + policy.total_s:
            return None
        budget_s = policy.total_s if self._state.ever_connected else min(policy.total_s, policy.first_connect_s)
        return next_delay_s(policy, attempt=self._attempt, error=error, elapsed_s=self._disconnected_s, budget_s=budget_s, jitter=self._jitter())

    def _log_retry(self, message: Message[Any], error: SandboxError, delay_s: float) -> None:
        if isinstance(error, ConnectFailed | Draining | CallUnfinished) or (self._attempt and isinstance(error, TransportError)):
            self._state.record_no_response(error)
        log.info("sending %s %s again in %.2f s: %s", message.method, message.path.partition("?")[0], delay_s, error)

    def _add_calls_to_error(self, message: Message[Any], error: SandboxError) -> None:
        if not message.call_ids:
            return
        known: dict[str, Any] = {"call_id": message.call_ids[0]} if len(message.call_ids) == 1 else {"call_ids": list(message.call_ids)}
        if isinstance(error, TransportError) or self._may_have_run:
            known["may_have_run"] = self._may_have_run
        error.extra = {**known, **error.extra}


class RetryLoop(Generic[T]):
    """The decisions of the loop that repeats one request. The senders add the I/O and the waiting.

    Args:
        message: the message that is sent.
        budget: the time left for retries.
        can_resend: returns whether the content of the request can be read again from its beginning.
    """

    def __init__(self, message: Message[T], budget: RetryBudget, can_resend: Callable[[], bool]) -> None:
        self._message = message
        self._budget = budget
        self._can_resend = can_resend
        self._unfinished: CallUnfinished | None = None

    def start_attempt(self) -> None:
        """Start timing an attempt."""
        self._budget.start_attempt()

    def delay_before_retry_s(self, error: SandboxError) -> float | None:
        """Return how long to wait before the next attempt, in seconds; None if there is none."""
        if isinstance(error, CallUnfinished):
            self._unfinished = error
        return self._budget.delay_before_retry_s(self._message, error, can_resend=self._can_resend())

    def final_value(self, error: SandboxError) -> Any:
        """Return the value of a request that is not repeated any more: the response of a service that stopped, if nothing but failures followed it.

        Raises:
            SandboxError: there is no such response; this is the error of the last attempt.
        """
        unfinished = self._unfinished
        if unfinished is not None and (error is unfinished or isinstance(error, TransportError | Draining)):
            return unfinished.value
        raise error
