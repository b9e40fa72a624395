"""What an earlier life left and nobody recorded goes, also where the backend cannot be asked at first."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from sandbox_server.core.errors import BackendUnavailable
from sandbox_server.core.types import Handle
from sandbox_server.testing import FakeBackend, settle

ORPHAN = Handle(backend="local", pool="default", owner="local", sandbox_id="s-orphan")


class Shy(FakeBackend):
    """Has an orphan. Cannot be listed, or does not let it go, while a test says so."""

    def __init__(self):
        super().__init__()
        self.handles[ORPHAN.sandbox_id] = ORPHAN
        self.handles["s-other"] = replace(ORPHAN, sandbox_id="s-other", owner="somebody else")
        self.unlistable = None
        self.sticky = False
        self.asked_at = []
        self.clock = None

    async def list_owned(self, owner):
        self.asked_at.append(self.clock.monotonic() if self.clock is not None else None)
        if self.unlistable is not None:
            raise self.unlistable
        return await super().list_owned(owner)

    async def destroy(self, handle):
        if self.sticky and handle.sandbox_id == ORPHAN.sandbox_id:
            raise OSError("it will not go")
        await super().destroy(handle)


@pytest.mark.parametrize("error", [OSError("nobody answers"), BackendUnavailable("nobody answers")])
async def test_a_backend_that_cannot_be_asked_is_asked_again_until_it_can(make_harness, caplog, error):
    backend = Shy()
    backend.unlistable = error
    harness = await make_harness(backend, min_sandboxes=1)
    backend.clock = harness.clock
    (mine,) = backend.created
    report = harness.pools.readiness()
    assert (report["ready"], report["pools"]["default"]["ready"]) == (False, False)
    assert report["pools"]["default"]["last_error"] == "backend 'local' could not be asked for orphaned sandboxes: nobody answers"
    assert (await harness.acquire()).leases, "leases can be had meanwhile"

    await harness.clock.advance(100)
    tries = len(backend.asked_at)
    backend.unlistable = None
    await harness.clock.advance(40)

    assert backend.destroyed == [ORPHAN.sandbox_id]
    assert set(backend.handles) == {mine, "s-other"}
    assert harness.pools.readiness()["ready"]
    assert harness.pools.readiness()["pools"]["default"]["last_error"] is None
    assert 5 < tries < 15, "it backs off"
    assert caplog.text.count("could not be asked") == 1, "and says so once"
    await harness.clock.advance(100)
    assert len(backend.asked_at) <= tries + 1, "once it was seen that none is left nobody looks again"


async def test_an_orphan_that_does_not_go_is_shown_and_tried_again(make_harness):
    backend = Shy()
    backend.sticky = True
    harness = await make_harness(backend, min_sandboxes=1)
    report = harness.pools.readiness()["pools"]["default"]
    assert (report["ready"], report["last_error"]) == (True, "an orphaned sandbox on backend 'local' could not be destroyed: s-orphan: it will not go")

    backend.sticky = False
    await harness.clock.advance(2)

    assert backend.destroyed == [ORPHAN.sandbox_id]
    assert harness.pools.readiness()["pools"]["default"]["last_error"] is None


async def test_what_this_life_makes_or_ends_while_it_looks_is_no_orphan(make_harness):
    class Slow(Shy):
        gate = None

        async def list_owned(self, owner):
            if self.gate is None:
                raise OSError("not yet")
            found = await super().list_owned(owner)
            await self.gate.wait()
            return [*found, *await super().list_owned(owner)]

    backend = Slow()
    harness = await make_harness(backend, min_sandboxes=1, max_sandboxes=2)
    (first,) = backend.created
    backend.gate = asyncio.Event()
    await harness.clock.advance(1)

    backend.kill(first)
    await harness.clock.advance(5)
    assert len(backend.created) == 2
    backend.gate.set()
    await settle()

    assert backend.destroyed == [first, ORPHAN.sandbox_id]
    assert harness.sandboxes() == {"ready": 1}


async def test_a_service_that_stops_looks_no_more(make_harness):
    backend = Shy()
    backend.unlistable = OSError("nobody answers")
    harness = await make_harness(backend, min_sandboxes=0)

    await harness.pools.stop()
    asked = len(backend.asked_at)
    await harness.clock.advance(100)

    assert len(backend.asked_at) == asked
