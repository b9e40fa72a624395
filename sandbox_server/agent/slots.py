"""The slots of a sandbox: who may do what in them (epochs), their journals, their reset and its proof."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING, Any, Callable, Coroutine

from sandbox_server.agent.calls import Call, Spec
from sandbox_server.agent.drains import Drains
from sandbox_server.agent.errors import Refused, StartFailed
from sandbox_server.agent.isolation.base import Body, prove_dirs
from sandbox_server.agent.journal import Journal, Verdict, identity
from sandbox_server.agent.output import Spool
from sandbox_server.agent.tools.process import Jobs

if TYPE_CHECKING:
    from sandbox_server.agent.bodies import Bodies

log = logging.getLogger(__name__)

STARTING, READY, RESETTING, QUARANTINED, BROKEN = "starting", "ready", "resetting", "quarantined", "broken"
FIRST_EPOCH = 1


class Slot:
    """One slot. Anything with another epoch than the slot's is refused: lower has moved on, higher was never announced."""

    def __init__(self, slot_id: str, bodies: Bodies, on_change: Callable[[Slot], None]) -> None:
        self.slot_id = slot_id
        self.loop = asyncio.get_event_loop()
        self._bodies = bodies
        self._on_change = on_change
        self.epoch = FIRST_EPOCH
        self.state = STARTING
        self.detail: str | None = None
        self.body: Body | None = None
        self.journal = Journal()
        self.jobs = Jobs(self)
        self.drains = Drains(self.loop)
        self.spool = self._new_spool()
        self._tasks: set[asyncio.Task[None]] = set()
        self._reset_task: asyncio.Task[dict[str, Any]] | None = None

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
        return view

    def _become(self, state: str, detail: str | None = None) -> None:
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
            self._adopt(await self._bodies.new(self.slot_id, self._bodies.config.network))
        except StartFailed as error:
            self._become(BROKEN, str(error))

    def adopt(self, body: Body) -> None:
        """Take a body that was started already."""
        self._adopt(body)

    def _adopt(self, body: Body) -> None:
        self.body = body
        body.slot_id = self.slot_id
        body.link.on_lost = lambda detail: self._init_lost(body, detail)
        if body.link.closed:
            self._become(BROKEN, "init has ended")
        else:
            self._become(READY)

    def _init_lost(self, body: Body, detail: str) -> None:
        if self.body is body and self.state == READY:
            log.warning("the init of a slot has ended", extra={"slot_id": self.slot_id, "detail": detail})
            self._become(BROKEN, "its init has ended: %s" % detail)

    def current_body(self) -> Body:
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

    def submit(self, spec: Spec, on_done: Callable[[Verdict], None]) -> None:
        """Run a call, join it, or repeat its verdict: it never runs twice."""
        what = identity(spec.tool, spec.args)
        entry = self.journal.get(spec.call_id)
        if entry is not None:
            if entry.identity != what:
                on_done(_refusal(spec, "call_conflict", "the call id %s was used with other arguments" % spec.call_id))
            elif entry.verdict is not None:
                on_done(entry.verdict)
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

    def find_call(self, call_id: Any) -> Call | Verdict:
        """A call that runs, or its verdict.

        Raises:
            Refused: call_not_found.
        """
        entry = self.journal.get(call_id) if isinstance(call_id, str) else None
        if entry is None:
            raise Refused("call_not_found", "there is no call %s" % ascii(call_id))
        if entry.verdict is not None:
            return entry.verdict
        call: Call = entry.call
        return call

    # Reset and narrow.

    def reset(self, epoch: Any, network: bool, keep: bool) -> asyncio.Task[dict[str, Any]]:
        """Make the slot clean for its next holder, whose epoch is given; everything older is refused from this moment.

        Returns:
            The task; asking again with the same epoch gives the same one.

        Raises:
            Refused: the epoch is not newer, or the mode has no slots without network.
        """
        if isinstance(epoch, bool) or not isinstance(epoch, int):
            raise Refused("invalid", "epoch must be an integer")
        if epoch == self.epoch and self._reset_task is not None:
            return self._reset_task
        if self.state == STARTING:
            raise Refused("slot_unavailable", "slot %s is still starting" % self.slot_id)
        if epoch <= self.epoch:
            raise Refused("stale_epoch", "slot %s is at epoch %d, not below %d" % (self.slot_id, self.epoch, epoch))
        if not network and "none" not in self._bodies.isolation.networks:
            raise Refused("not_implemented", "slots without network need the mode bwrap, not %s" % self._bodies.isolation.name)
        before, self._reset_task = self._reset_task, None
        old_spool = self._spool_folder()
        self._abandon_calls()
        self.epoch = epoch
        self.journal = Journal()
        self.spool = self._new_spool()
        self.jobs = Jobs(self)
        if self.state != QUARANTINED:
            self._become(RESETTING)
        self._reset_task = self.loop.create_task(self._reset(before, network, keep, old_spool))
        return self._reset_task

    def _abandon_calls(self) -> None:
        for call in self.journal.running():
            call.abandon()
        self.jobs.close()

    async def _reset(self, before: asyncio.Task[dict[str, Any]] | None, network: bool, keep: bool, old_spool: str) -> dict[str, Any]:
        began = self.loop.time()
        if before is not None:
            await asyncio.wait([before])
        self._bodies.trash.throw(old_spool)
        proof: dict[str, Any] = {}
        if self.state == QUARANTINED:
            return {"state": QUARANTINED, "detail": self.detail, "proof": proof, "duration_s": 0.0}
        try:
            proof = await self._exchange(network, keep)
        except (StartFailed, OSError) as error:
            self._become(BROKEN, str(error))
            return {"state": QUARANTINED, "detail": str(error), "proof": proof, "duration_s": self.loop.time() - began}
        if proof.get("clean"):
            self._become(READY)
        else:
            self._become(QUARANTINED, str(proof.get("detail", "the end of the slot could not be proven")))
        return {"state": self.state, "detail": self.detail, "proof": proof, "duration_s": self.loop.time() - began}

    async def _exchange(self, network: bool, keep: bool) -> dict[str, Any]:
        """End the old body; when its end is proven, take a new one."""
        old, self.body = self.body, None
        proof: dict[str, Any] = {"clean": True}
        if old is not None:
            old.link.on_lost = None
            self.drains.close()
            proof = await self._bodies.end(old, keep)
            if not proof["clean"]:
                return proof
        if keep and old is not None:
            body = await self._bodies.again(old, self.slot_id, network)
        else:
            body = await self._bodies.new(self.slot_id, network)
            wrong = prove_dirs(body.dirs, body.uid)
            proof["workspace_empty"] = wrong is None
            if wrong is not None:
                proof.update(clean=False, detail=wrong)
        self.body = body
        body.slot_id = self.slot_id
        body.link.on_lost = lambda detail: self._init_lost(body, detail)
        if body.link.closed:
            proof.update(clean=False, detail="the new init has ended")
        return proof

    async def narrow(self, network: bool) -> None:
        """Processes end, files stay, the network is gone for good."""
        if network:
            raise Refused("invalid", "narrow only takes rights away")
        if "none" not in self._bodies.isolation.networks:
            raise Refused("not_implemented", "slots without network need the mode bwrap, not %s" % self._bodies.isolation.name)
        if self.body is not None and not self.body.network:
            return
        for call in self.journal.running():
            call.abandon()
        self.jobs.close()
        self._become(RESETTING)
        epoch = self.epoch
        try:
            proof = await self._exchange(False, keep=True)
        except (StartFailed, OSError) as error:
            self._become(BROKEN, str(error))
            raise Refused("slot_unavailable", "the slot could not be started again: %s" % error) from None
        if epoch == self.epoch:
            self._become(READY if proof["clean"] else QUARANTINED, proof.get("detail"))

    async def end(self) -> None:
        """The agent is told to end."""
        self._abandon_calls()
        self.drains.close()
        body, self.body = self.body, None
        if body is not None:
            body.link.on_lost = None
            await self._bodies.end(body, keep=False)


def _refusal(spec: Spec, reason: str, error: str, metadata: dict[str, Any] | None = None) -> Verdict:
    return Verdict(spec.call_id, reason, None, error, 0.0, 0.0, 0.0, 0, False, metadata or {}, ())
