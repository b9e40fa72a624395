"""How long a request that gets no answer is sent again, and what is said of that. The clock is given; there is no other I/O than the log."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from env_client.errors import ConnectFailed, Draining, QuotaExceeded, SandboxError, TransportError
from env_client.messages.message import Message
from env_client.retry import RetryPolicy, Unfinished, may_retry, next_delay_s

log = logging.getLogger("env_client")

CONNECT_S = 10.0


class Contact:
    """What the senders of one client share. That its service is away is said once when it begins, and once when it is over.

    Args:
        url: the service's address.
        clock: monotonic seconds.
    """

    def __init__(self, url: str, clock: Callable[[], float]) -> None:
        self._url = url
        self._clock = clock
        self._lock = threading.Lock()
        self._since: float | None = None
        #: Whether a connection was ever made.
        self.met = False
        #: Whether the client was closed.
        self.closed = False

    def begins(self, error: SandboxError) -> None:
        """A request found no service."""
        with self._lock:
            first = self._since is None
            if first:
                self._since = self._clock()
        if first:
            log.warning("no answer from %s, asking it again: %s", self._url, error)

    def over(self) -> None:
        """The service has answered."""
        self.met = True
        if self._since is None:
            return
        with self._lock:
            since, self._since = self._since, None
        if since is not None:
            log.warning("%s answers again after %.1f s", self._url, self._clock() - since)


class RetryBudget:
    """What is left of a client's patience with one request. Two things are counted apart: time without a connection, from when it was lost
    or first refused, up to `total_s`; and time on connections that were made, up to what the answer may rightly take and `total_s` again.

    Args:
        policy: how patient the client is.
        contact: what the client knows of its service.
        clock: monotonic seconds.
        unit: random numbers from 0 to 1.
    """

    def __init__(self, policy: RetryPolicy, contact: Contact, clock: Callable[[], float], unit: Callable[[], float]) -> None:
        self._policy = policy
        self._contact = contact
        self._clock = clock
        self._unit = unit
        self._attempt = 0
        self._away_s = 0.0
        self._waited_s = 0.0
        self._began = clock()
        self._may_have_run = False

    def begin(self) -> None:
        """An attempt begins."""
        self._began = self._clock()

    def alive(self) -> None:
        """Something has come on the connection: what went before is forgiven."""
        self._began, self._away_s, self._waited_s = self._clock(), 0.0, 0.0

    def moved(self) -> None:
        """Something that was asked for has come."""
        self._attempt = 0

    def wait_s(self, message: Message[Any], error: SandboxError, repeatable: bool = True) -> float | None:
        """How long to wait before sending again, in seconds; None: do not, and the error says what is known of the call.

        Args:
            message: what was sent.
            error: what the attempt came to.
            repeatable: whether it can be sent again at all.
        """
        self._spend(error)
        delay_s = self._delay_s(message, error, repeatable)
        if delay_s is None:
            self._name_calls(message, error)
            return None
        self._say(message, error, delay_s)
        if isinstance(error, QuotaExceeded):
            self._waited_s += delay_s  # its turn comes by waiting, as the answer does
        else:
            self._away_s += delay_s
        self._attempt += 1
        return delay_s

    def _spend(self, error: SandboxError) -> None:
        took_s = self._clock() - self._began
        if isinstance(error, ConnectFailed):
            self._away_s += min(took_s, CONNECT_S)  # before that it waited for its turn at the connections
            return
        self._contact.met = True
        self._may_have_run = self._may_have_run or isinstance(error, TransportError)
        self._waited_s += took_s
        self._away_s = max(0.0, self._away_s - took_s)  # one that held for long was no outage; one that is cut at once goes on being one

    def _delay_s(self, message: Message[Any], error: SandboxError, repeatable: bool) -> float | None:
        policy = self._policy
        if not policy.total_s or not may_retry(error, repeatable=message.repeatable and repeatable, final_codes=message.final_codes):
            return None
        if self._waited_s >= message.answer_within_s + policy.total_s:
            return None
        budget_s = policy.total_s if self._contact.met else min(policy.total_s, policy.first_connect_s)
        return next_delay_s(policy, attempt=self._attempt, error=error, elapsed_s=self._away_s, budget_s=budget_s, unit=self._unit())

    def _say(self, message: Message[Any], error: SandboxError, delay_s: float) -> None:
        if isinstance(error, ConnectFailed | Draining | Unfinished) or (self._attempt and isinstance(error, TransportError)):
            self._contact.begins(error)
        log.info("sending %s %s again in %.2f s: %s", message.method, message.path.partition("?")[0], delay_s, error)

    def _name_calls(self, message: Message[Any], error: SandboxError) -> None:
        if not message.call_ids:
            return
        known: dict[str, Any] = {"call_id": message.call_ids[0]} if len(message.call_ids) == 1 else {"call_ids": list(message.call_ids)}
        if isinstance(error, TransportError) or self._may_have_run:
            known["may_have_run"] = self._may_have_run
        error.extra = {**known, **error.extra}
