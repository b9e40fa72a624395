"""Asks one backend for the state of its sandboxes, in batches, for all of its pools."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from sandbox_server.backends.base import Backend, Observation, ObservedState, WatchesSandboxes
from sandbox_server.core.clock import Clock
from sandbox_server.core.errors import PoolServiceError
from sandbox_server.core.types import Handle
from sandbox_server.pool.timers import Timers

log = logging.getLogger(__name__)

#: How long one answer may take before it counts as a failure, in seconds.
ANSWER_WITHIN_S = 10.0
#: The pause after a first failure; it doubles with each further one.
FIRST_OBSERVE_PAUSE_S = 0.5
LONGEST_OBSERVE_PAUSE_S = 15.0

_Questions = dict[str, tuple[Handle, list[asyncio.Future[Observation]]]]


class BackendObserver:
    """Collects the questions of all sandboxes of one backend and asks them together: one batch at a time, at the interval that the traits of the backend set.

    While a backend cannot be asked, the observations of its sandboxes are `UNKNOWN`.

    Args:
        backend: the backend. Its traits say how often it may be asked.
        clock: the clock of the pauses.
        timers: wait for the end of a pause.
    """

    def __init__(self, backend: Backend, clock: Clock, timers: Timers) -> None:
        self._backend = backend
        self._clock = clock
        self._timers = timers
        self._questions: _Questions = {}
        self._not_before = float("-inf")
        self._failures = 0
        self._asking: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._watch_not_before = float("-inf")

    def request_observation(self, handle: Handle) -> asyncio.Future[Observation]:
        """Ask for the state of one sandbox, together with the next batch of questions.

        Args:
            handle: the sandbox's last checkpoint.

        Returns:
            A future for what the backend answers; `UNKNOWN`, with the reason, if it cannot be asked. It may be cancelled.
        """
        future: asyncio.Future[Observation] = asyncio.get_running_loop().create_future()
        self._questions.setdefault(handle.sandbox_id, (handle, []))[1].append(future)
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask_until_answered())
        self._start_watching()
        return future

    def _start_watching(self) -> None:
        """Watch the backend, if it can be watched and is not watched yet. At least `LONGEST_OBSERVE_PAUSE_S` lies between two starts."""
        is_watching = self._watching is not None and not self._watching.done()
        if isinstance(self._backend, WatchesSandboxes) and not is_watching and self._clock.monotonic() >= self._watch_not_before:
            self._watch_not_before = self._clock.monotonic() + LONGEST_OBSERVE_PAUSE_S
            self._watching = asyncio.create_task(self._watch(self._backend))

    async def stop_asking(self) -> None:
        """Stop asking the backend. Futures of `request_observation` that have no result yet never get one."""
        tasks = [task for task in (self._asking, self._watching) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask_until_answered(self) -> None:
        while self._drop_cancelled():
            pause_s = self._not_before - self._clock.monotonic()
            if pause_s > 0:
                await self._timers.sleep(pause_s)
                continue
            questions, self._questions = self._questions, {}
            _answer(questions, await self._observe([handle for handle, _ in questions.values()]))

    def _drop_cancelled(self) -> bool:
        """Drop the questions whose futures were all cancelled. Returns whether any are left."""
        waiting = {sandbox_id: (handle, [one for one in futures if not one.done()]) for sandbox_id, (handle, futures) in self._questions.items()}
        self._questions = {sandbox_id: question for sandbox_id, question in waiting.items() if question[1]}
        return bool(self._questions)

    async def _observe(self, handles: list[Handle]) -> Mapping[str, Observation]:
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                observations = await self._backend.observe(handles)
        except (OSError, PoolServiceError, TimeoutError) as error:
            reason = str(error) or f"it did not answer within {ANSWER_WITHIN_S:g} s"
            return dict.fromkeys((handle.sandbox_id for handle in handles), self._note_failure(reason))
        except Exception as error:  # a fault of the backend's code must not end the loop that all its sandboxes depend on
            log.exception("observing sandboxes failed", extra={"backend": self._backend.name})
            return dict.fromkeys((handle.sandbox_id for handle in handles), self._note_failure(f"{type(error).__name__}: {error}"))
        if self._failures:
            log.info("backend %s can be asked for its sandboxes again", self._backend.name)
        self._failures = 0
        self._not_before = self._clock.monotonic() + self._backend.traits.observe_interval_s
        return observations

    def _note_failure(self, reason: str) -> Observation:
        pause_s = min(FIRST_OBSERVE_PAUSE_S * 2.0 ** min(self._failures, 16), LONGEST_OBSERVE_PAUSE_S)
        self._failures += 1
        self._not_before = self._clock.monotonic() + max(pause_s, self._backend.traits.observe_interval_s)
        if self._failures == 1:
            log.warning("backend %s cannot be asked for its sandboxes; unreachable ones are kept until it can: %s", self._backend.name, reason)
        return Observation(state=ObservedState.UNKNOWN, detail=f"backend {self._backend.name!r} cannot be asked for it: {reason}")

    async def _watch(self, backend: WatchesSandboxes) -> None:
        """Answer questions with the changes that the backend reports by itself, which arrive earlier than the next batch. The batches go on meanwhile.

        If this ends, for whatever reason, a later question starts it again: see `_start_watching`.
        """
        try:
            async for changes in backend.watch():
                changed = self._questions.keys() & changes.keys()
                _answer({sandbox_id: self._questions.pop(sandbox_id) for sandbox_id in changed}, changes)
        except (OSError, PoolServiceError) as error:
            log.warning("backend %s reports no changes of its sandboxes now, and is asked instead: %s", self._backend.name, error)
        except Exception:  # nobody awaits this task, so that a fault of the backend's code would be lost
            log.exception("watching sandboxes failed; the backend is asked instead", extra={"backend": self._backend.name})


def _answer(questions: _Questions, observations: Mapping[str, Observation]) -> None:
    for sandbox_id, (_, futures) in questions.items():
        observation = observations.get(sandbox_id) or Observation(state=ObservedState.UNKNOWN, detail="its backend did not report it")
        for future in futures:
            if not future.done():
                future.set_result(observation)
