"""The slots of a sandbox: who may do what in them (epochs), their journals, their bodies."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from typing import TYPE_CHECKING, Any, Callable, Coroutine

from sandbox_server.agent.config import Limits
from sandbox_server.agent.errors import Refused, StartFailed
from sandbox_server.agent.execution.calls import Call, Spec
from sandbox_server.agent.execution.drains import Drains
from sandbox_server.agent.execution.evidence import of_lost_init
from sandbox_server.agent.execution.journal import CallOutcome, Journal, identity
from sandbox_server.agent.execution.output import Spool
from sandbox_server.agent.execution.slot_runtime import CacheFolder, SlotRuntime
from sandbox_server.agent.execution.tools.jobs import Jobs
from sandbox_server.agent.kernel.processor_share import promised_share

if TYPE_CHECKING:
    from sandbox_server.agent.slots.runtimes import RuntimePool

log = logging.getLogger(__name__)

STARTING, READY, RESETTING, QUARANTINED, BROKEN = "starting", "ready", "resetting", "quarantined", "broken"
FIRST_EPOCH = 1


class Slot:
    """One slot. Anything with another epoch than the slot's is refused: lower has moved on, higher was never announced."""

    def __init__(self, slot_id: str, bodies: RuntimePool, on_change: Callable[[Slot], None]) -> None:
        self.slot_id = slot_id
        self.loop = asyncio.get_event_loop()
        self._bodies = bodies
        self._on_change = on_change
        self.epoch = FIRST_EPOCH
        self.state = STARTING
        self.detail: str | None = None
        self.body: SlotRuntime | None = None
        self.journal = Journal()
        self.jobs = Jobs(self)
        self.drains = Drains(self.loop, bodies.most_drains)
        self.live: set[Call] = set()  # those that have processes
        self.spool = self._new_spool()
        self._tasks: set[asyncio.Task[None]] = set()
        self.lost_by: dict[str, Any] = {}  # the evidence of why its init is gone; whose doing that was is said by `own_work` or `ambiguous` in it
        self.cache: CacheFolder | None = None  # what its holder was given

    def _new_spool(self) -> Spool:
        return Spool(self._spool_folder(), self._bodies.config.spool_bytes)

    def _spool_folder(self) -> str:
        return os.path.join(self._bodies.config.base_dir, "spool", self.slot_id, str(self.epoch))

    def view(self) -> dict[str, Any]:
        """The slot as the service sees it."""
        body = self.body
        view = {
            "slot_id": self.slot_id,
            "epoch": self.epoch,
            "state": self.state,
            "isolation": self._bodies.isolation.name,
            "workspace": body.workspace if body is not None else None,
            "tmp": body.tmp if body is not None else None,
            "network": body.network if body is not None else None,
        }
        if self.detail is not None:
            view["detail"] = self.detail
        if self.lost_by:
            view["evidence"] = self.lost_by
        return view

    def become(self, state: str, detail: str | None = None) -> None:
        """Be in another state, and say so."""
        self.state, self.detail = state, detail
        self._on_change(self)

    def spawn_task(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something behind; the slot keeps it alive."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a task of a slot failed", extra={"slot_id": self.slot_id}, exc_info=task.exception())

    # Bodies.

    async def start(self) -> None:
        """Give the slot its first body."""
        try:
            self.adopt(await self._bodies.new(self.slot_id, self._bodies.config.network))
        except StartFailed as error:
            self.become(BROKEN, str(error))

    def adopt(self, body: SlotRuntime) -> None:
        """Take a body that was started already."""
        if self.take_body(body):
            self.become(READY)
        else:
            self.become(BROKEN, "init has ended")

    def _init_lost(self, body: SlotRuntime, detail: str) -> None:
        if self.body is body and self.state == READY:
            log.warning("the init of a slot has ended", extra={"slot_id": self.slot_id, "detail": detail})
            _, _, metadata = of_lost_init(body, {}, detail)
            self.lost_by = metadata["evidence"]
            self.become(BROKEN, ("its own work ran out of memory: %s" if "oom_kills" in self.lost_by else "%s") % detail)

    @property
    def limits(self) -> Limits:
        """What the slot may use."""
        return self._bodies.config.limits

    @property
    def processor_share(self) -> float:
        """How many processors the slot is promised."""
        config = self._bodies.config
        return promised_share(len(os.sched_getaffinity(0)), config.slots, config.limits.cpu)

    def current_body(self) -> SlotRuntime:
        """The body calls run in."""
        if self.body is None:
            raise Refused("slot_unavailable", "the slot has no body")
        return self.body

    # Who may.

    def admit(self, epoch: Any) -> None:
        """Let a request through, or say why not.

        Raises:
            Refused: stale_epoch or slot_unavailable.
        """
        if epoch != self.epoch:
            raise Refused("stale_epoch", "slot %s is at epoch %d, not %s" % (self.slot_id, self.epoch, ascii(epoch)))
        if self.state != READY:
            raise Refused("slot_unavailable", "slot %s is %s%s" % (self.slot_id, self.state, ": " + self.detail if self.detail else ""))

    def check_epoch(self, epoch: Any) -> None:
        """As `admit`, for what only looks into the journal."""
        if epoch != self.epoch:
            raise Refused("stale_epoch", "slot %s is at epoch %d, not %s" % (self.slot_id, self.epoch, ascii(epoch)))

    # Calls.

    def submit(self, spec: Spec, on_done: Callable[[CallOutcome], None]) -> None:
        """Run a call, join it, or repeat its verdict: it never runs twice."""
        what = identity(spec.tool, spec.args)
        entry = self.journal.get(spec.call_id)
        if entry is not None:
            if entry.identity != what:
                on_done(_refusal(spec, "call_conflict", "the call id %s was used with other arguments" % spec.call_id))
            elif entry.outcome is not None:
                on_done(entry.outcome)
            else:
                entry.call.on_done(on_done)
            return
        if self.journal.full:
            on_done(_refusal(spec, "backend_error", "the slot has had as many calls as one lease may have", {"may_have_run": False, "limit": "calls"}))
            return
        call = Call(self, spec)
        self.journal.begin(spec.call_id, what, call)
        call.on_done(on_done)
        call.start()

    def joined_by(self, call: Call) -> bool:
        """A call gets processes; whether it has company by other calls or jobs. They have its company from now on as well."""
        concurrent_calls = bool(self.live) or self.jobs.running > 0
        self.keep_company()
        self.live.add(call)
        return concurrent_calls

    def keep_company(self) -> None:
        """Something begins to run beside the calls that do."""
        for call in self.live:
            call.concurrent_calls = True

    def find_call(self, call_id: Any) -> Call | CallOutcome:
        """A call that runs, or its verdict.

        Raises:
            Refused: call_not_found.
        """
        entry = self.journal.get(call_id) if isinstance(call_id, str) else None
        if entry is None:
            raise Refused("call_not_found", "there is no call %s" % ascii(call_id))
        if entry.outcome is not None:
            return entry.outcome
        call: Call = entry.call
        return call

    # What `SlotTransitions` does to it.

    def move_on(self, epoch: int) -> str:
        """Belong to another holder: what ran is cancelled, what was recorded is forgotten.

        Returns:
            The folder of the outputs that nobody may read any more.
        """
        spool = self._spool_folder()
        self.abandon_calls()
        self.cache = None
        self.lost_by = {}
        self.live.clear()
        self.epoch = epoch
        self.journal = Journal()
        self.spool = self._new_spool()
        self.jobs = Jobs(self)
        return spool

    def abandon_calls(self, lost: str | None = None) -> None:
        """What runs ends as cancelled, or as lost with the sandbox, and why; its processes are somebody else's to end."""
        for call in self.journal.running():
            call.abandon(lost)
        self.jobs.close()

    def give_up_body(self) -> SlotRuntime | None:
        """Have no body from now on; the old one is the caller's to end."""
        body, self.body = self.body, None
        if body is not None:
            body.link.on_lost = None
            self.drains.close()
        return body

    def take_body(self, body: SlotRuntime) -> bool:
        """Have a new body; whether it still lives."""
        self.body = body
        body.slot_id = self.slot_id
        body.link.on_lost = lambda detail: self._init_lost(body, detail)
        body.link.on_in_flight_full = self._bodies.on_in_flight_full
        return not body.link.closed

    async def end(self) -> None:
        """The agent is told to end. Nobody has cancelled what still runs."""
        why = "its agent was told to end"
        # Told to nobody: the end of the agent says more. But what is asked until then is lost too.
        if self.state == READY:
            self.state, self.detail = BROKEN, why
        self.abandon_calls(why)
        body = self.give_up_body()
        if body is not None:
            await self._bodies.end(body, keep=False)


def _refusal(spec: Spec, reason: str, error: str, metadata: dict[str, Any] | None = None) -> CallOutcome:
    metadata = {"evidence": {"ran": False}, **(metadata or {})}
    return CallOutcome(spec.call_id, reason, None, error, time.time(), 0.0, 0.0, 0, False, metadata, ())
