"""What is ours: an agent, a sandbox, a link or the service that fails under calls. Nothing of it is scored as the policy's, and what can be saved is."""

from __future__ import annotations

import signal
import time
import uuid
from typing import Any

import pytest

from tests.integration.attribution.conftest import Open
from tests.integration.attribution.pool_harness import PoolHarness, blame, frozen, proof, send, wait_gone

LOST = ("sandbox_lost", "infra", None)


@pytest.fixture
def own(open_pool: Open) -> PoolHarness:
    """A pool of the test's own."""
    return open_pool(slots_per_sandbox=3)


def kill_agent(harness: PoolHarness, lease: dict[str, Any]) -> None:
    harness.agent(lease).kill()


def end_agent(harness: PoolHarness, lease: dict[str, Any]) -> None:
    harness.agent(lease).terminate()


def kill_everything(harness: PoolHarness, lease: dict[str, Any]) -> None:
    agent = harness.agent(lease)
    send(signal.SIGKILL, [agent, *agent.children(recursive=True)])


@pytest.mark.parametrize("loses", [kill_agent, end_agent, kill_everything], ids=lambda loses: loses.__name__)
def test_a_sandbox_that_ends_under_its_calls_is_ours_on_every_lease_and_stays_so(own: PoolHarness, loses: Any) -> None:
    leases = own.acquire(3)
    assert len({lease["sandbox_id"] for lease in leases}) == 1
    call_id = uuid.uuid4().hex
    running = [own.begin_bash(lease, "echo part; sleep 60", call_id=call_id) for lease in leases[:2]]
    before = time.monotonic()
    loses(own, leases[0])
    results = [future.result()[0] for future in running]

    assert time.monotonic() - before < 10
    for result in results:
        assert blame(result) == LOST
        assert "agent" in result["error"]
    for lease in leases:
        later = own.bash(lease, "true")
        assert blame(later) == LOST
        assert later["metadata"]["may_have_run"] is False
        while own.ask("GET", f"/v1/leases/{lease['lease_id']}").get("state") == "held":
            assert time.monotonic() - before < 20, "the agent has ended, and the service does not see it"
        assert own.ask("GET", f"/v1/leases/{lease['lease_id']}")["code"] == "sandbox_lost"
    # Recorded: asked again, it is the same, and nothing runs.
    again = own.begin({"lease_id": leases[0]["lease_id"], "tool": "bash", "args": {"command": "echo else"}, "call_id": call_id}).result()[0]
    assert blame(again) == ("call_conflict", "infra", None)
    assert own.ask("GET", f"/v1/leases/{leases[0]['lease_id']}/calls/{call_id}")["result"] == results[0]
    assert own.bash(own.acquire()[0], "echo replaced")["output"] == "replaced\n"


def test_an_init_killed_from_outside_costs_its_lease_alone_and_is_ours(harness: PoolHarness) -> None:
    lease, neighbour = harness.acquire(2)
    init = harness.init(lease)
    beside = harness.begin_bash(neighbour, "until [ -e go ]; do sleep 0.02; done; echo fine")
    calls = [{"lease_id": lease["lease_id"], "tool": "bash", "args": {"command": command}} for command in ("echo part; touch up; sleep 60", "echo next")]
    running = harness.begin(*calls)
    harness.until_in(lease, "[ -e up ]")
    init.kill()
    first, second = running.result()

    assert blame(first) == blame(second) == blame(harness.bash(lease, "true")) == LOST
    assert first["output"] == "part\n"
    assert "own_work" not in proof(first)
    assert proof(second)["ran"] is False
    harness.bash(neighbour, "touch go")
    assert beside.result()[0]["output"] == "fine\n"


def test_a_call_that_ended_while_its_agent_stood_still_has_not_timed_out(harness: PoolHarness) -> None:
    (lease,) = harness.acquire()
    init = harness.init(lease)
    running = harness.begin_bash(lease, "sleep 0.5; echo done", timeout_s=1)
    with frozen(harness.agent(lease)):
        harness.until(lambda: not init.children())  # it has ended
        time.sleep(1.2)  # and its deadline passes
    (result,) = running.result()

    assert blame(result) == ("exit", "none", 0)
    assert result["output"] == "done\n"


def test_the_time_in_which_all_of_a_sandbox_stood_still_is_not_the_calls(harness: PoolHarness) -> None:
    (lease,) = harness.acquire()
    running = [harness.begin_bash(lease, "sleep 0.8; echo done", **{deadline: 1.2}) for deadline in ("timeout_s", "no_output_timeout_s")]
    agent = harness.agent(lease)
    with frozen(agent, *agent.children(recursive=True)):
        time.sleep(2.5)  # nothing can tell that a deadline has passed
    for future in running:
        (result,) = future.result()
        assert (blame(result), result["output"]) == (("exit", "none", 0), "done\n")


def test_a_link_that_breaks_under_a_call_costs_it_nothing(harness: PoolHarness) -> None:
    (lease,) = harness.acquire()
    running = harness.begin_bash(lease, "echo part; until [ -e go ]; do sleep 0.02; done; echo done")

    assert harness.cut_links() == 1
    harness.until(lambda: harness.bash(lease, "touch go")["success"])
    (result,) = running.result()

    assert (blame(result), result["output"]) == (("exit", "none", 0), "part\ndone\n")


def call_of(lease: dict[str, Any], command: str, call_id: str) -> dict[str, Any]:
    return {"lease_id": lease["lease_id"], "tool": "bash", "args": {"command": command}, "timeout_s": 30, "call_id": call_id}


def test_a_service_that_is_killed_costs_its_calls_nothing_unless_their_agent_dies_meanwhile(open_service: Open) -> None:
    harness = open_service(slots_per_sandbox=1, min_sandboxes=2, on_shutdown="destroy")
    lives, dies = harness.acquire(), harness.acquire()
    saved, lost = (
        call_of(lives[0], "touch up; until [ -e go ]; do sleep 0.02; done; echo $$ done >> runs; cat runs", "c"),
        call_of(dies[0], "touch up; sleep 60", "c"),
    )
    cut = [harness.begin(call) for call in (saved, lost)]
    for lease in (lives[0], dies[0]):
        harness.until_in(lease, "[ -e up ]")
    agent = harness.agent(dies[0])
    harness.kill_service()
    for future in cut:
        assert future.exception() is not None
    agent.send_signal(signal.SIGKILL)
    wait_gone([agent])
    harness.start_service_again()

    again = harness.begin(saved)
    harness.until(lambda: harness.bash(lives[0], "touch go")["success"])
    (result,) = again.result()
    assert blame(result) == ("exit", "none", 0)
    assert result["output"].count("done") == 1
    for call in (lost, call_of(dies[0], "true", "d")):
        (gone,) = harness.batch(call)
        assert blame(gone) == LOST, gone
        assert "its agent has ended" in gone["error"]
