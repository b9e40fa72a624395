"""The typed client: which messages it sends, and how it reads the responses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import pytest

from sandbox_server.core.execution import ToolCall
from sandbox_server.link.agent_client import AgentClient
from sandbox_server.link.agent_reports import ResetReport, read_verify_report
from sandbox_server.link.call_messages import OutputHeader, ResultMessage, RunningCall, read_result_message
from sandbox_server.link.errors import (
    AgentFailed,
    AgentProtocolError,
    AgentRefused,
    AgentShutsDown,
    CallUnknown,
    FileOperationFailed,
    LinkLost,
    NotSupportedByAgent,
    PathNotFound,
    ReadOnlyNotSupported,
    RequestInvalid,
    SlotUnavailable,
    agent_refusal,
)
from sandbox_server.testing import FakeAgent, FakeLink, FakeSlot
from tests.support.scripted_agent import ScriptedAgent


@pytest.fixture
def agent() -> ScriptedAgent:
    return ScriptedAgent("s-1", slots=2)


@pytest.fixture
async def client(agent: ScriptedAgent) -> AsyncIterator[AgentClient]:
    it = AgentClient(await FakeLink.to(agent, agent.token))
    yield it
    await it.close()


async def fake_client(agent: FakeAgent) -> AgentClient:
    return AgentClient(await FakeLink.to(agent, agent.token))


async def test_the_report_is_the_hello_checked(client: AgentClient, agent: ScriptedAgent) -> None:
    report = client.report("s-1")

    assert (report.boot, report.isolation, report.error, report.capability_names("network")) == (agent.boot, "bwrap", "", {"none", "shared"})
    with pytest.raises(AgentProtocolError, match="right sandbox id"):
        client.report("s-2")


async def test_an_agent_without_an_isolation_mode_says_why() -> None:
    agent = FakeAgent("s-1", isolation=None)
    client = await fake_client(agent)

    report = client.report("s-1")

    assert (report.isolation, report.error) == ("", "no mode works: this agent is a fake")
    await client.close()


async def test_slots_are_watched_until_the_link_is_lost(client: AgentClient, agent: ScriptedAgent) -> None:
    async with aclosing(client.watch_slots("s-1")) as updates:
        first = await anext(updates)
        agent.set_slot("1", "broken", "out of memory", {"own_work": True, "deep": {}})
        second = await anext(updates)
        agent.hang_up()
        with pytest.raises(LinkLost):
            await anext(updates)

    assert [(slot.ref.slot_id, slot.state) for slot in first.slots] == [("0", "ready"), ("1", "ready")]
    assert [(slot.ref.sandbox_id, slot.state, slot.detail, slot.evidence) for slot in second.slots] == [("s-1", "broken", "out of memory", {"own_work": True})]
    assert not client.is_connected


async def test_an_agent_that_announces_its_end_is_sent_no_call_any_more(client: AgentClient, agent: ScriptedAgent) -> None:
    async with aclosing(client.watch_slots("s-1")) as updates:
        await anext(updates)
        agent.announce_end()
        await anext(updates)

        with pytest.raises(AgentShutsDown, match="told to end"):
            client.slot("0", 1).open_calls()
    assert client.is_connected
    assert not agent.ran


async def test_the_requests_about_slots_have_the_fields_that_agents_know() -> None:
    agent = FakeAgent("s-1")
    client = await fake_client(agent)

    assert await client.reset_slot("0", 2, has_network=True, keeps_files=False) == ResetReport(problem=None)
    verified = await client.verify_slot("0", 3, has_network=True)
    await client.equip_slot("0", 3, has_network=True, cache_key="r-1")
    await client.narrow_slot("0", 3, has_network=False, cache_key=None)
    assert await client.wait_until_quiet("0", 3) is False
    await client.drop_cache("r-1")

    assert (verified.found, verified.left, verified.is_clean, verified.problem) == (("file", "process"), (), True, None)
    assert agent.requests == [
        {"op": "reset", "slot": "0", "epoch": 2, "network": True, "keep": False},
        {"op": "verify", "slot": "0", "epoch": 3, "network": True},
        {"op": "equip", "slot": "0", "epoch": 3, "cache": "r-1", "network": True},
        {"op": "narrow", "slot": "0", "epoch": 3, "network": False, "cache": None},
        {"op": "quiet", "slot": "0", "epoch": 3},
        {"op": "cache_drop", "cache": "r-1"},
    ]
    await client.close()


async def test_read_only_entries_are_asked_of_agents_that_have_them_and_confirm_them() -> None:
    class Silent(FakeAgent):
        confirms = True

        def narrow(self, slot: FakeSlot, meta: dict[str, Any]) -> dict[str, Any]:
            return super().narrow(slot, meta) if self.confirms else {}

    agent = Silent("s-1")
    client = await fake_client(agent)
    await client.narrow_slot("0", 1, has_network=True, cache_key=None, read_only=("tests",))
    assert agent.requests == [{"op": "narrow", "slot": "0", "epoch": 1, "network": True, "cache": None, "read_only": ["tests"]}]
    agent.confirms = False
    with pytest.raises(AgentFailed, match="did not confirm"):
        await client.narrow_slot("0", 1, has_network=True, cache_key=None, read_only=("tests", "b"))
    await client.close()

    older = FakeAgent("s-1")
    older.can_make_read_only = False
    client = await fake_client(older)
    with pytest.raises(ReadOnlyNotSupported):
        await client.narrow_slot("0", 1, has_network=False, cache_key=None, read_only=("tests",))
    assert older.requests == [], "an older agent would take the network and ignore the entries"
    await client.close()


async def test_a_slot_in_another_epoch_has_moved_on(client: AgentClient) -> None:
    with pytest.raises(SlotUnavailable):
        await client.wait_until_quiet("0", 0)
    with pytest.raises(SlotUnavailable):
        await client.slot("0", 9).call_status("c")


def tool_call(command: str, call_id: str) -> ToolCall:
    return ToolCall(call_id=call_id, lease_id="l", tool="bash", args={"command": command})


async def run(client: AgentClient, *calls: ToolCall) -> list[ResultMessage]:
    async with client.slot("0", 1).open_calls() as stream:
        for call in calls:
            stream.send_call(call, 5.0)
        stream.end_calls()
        messages = []
        while (message := await stream.next_result()) is not None:
            messages.append(message)
        return messages


async def test_calls_get_their_results_in_their_order(client: AgentClient, agent: ScriptedAgent) -> None:
    messages = await run(client, tool_call("echo 1", "c1"), tool_call("exit 3", "c2"))

    assert [(message.call_id, message.to_result(tool_call("", "c")).exit_code) for message in messages] == [("c1", 0), ("c2", 3)]
    assert agent.requests == [{"op": "calls", "slot": "0", "epoch": 1, "fetches_outputs": True}]


async def test_a_call_is_asked_about_followed_and_cancelled(client: AgentClient, agent: ScriptedAgent) -> None:
    slot = client.slot("0", 1)
    running = asyncio.create_task(run(client, tool_call("live", "c")))
    while not agent.ran:
        await asyncio.sleep(0)
    agent.write("c", b"abc")

    status = await slot.call_status("c")
    assert status == RunningCall(output_bytes=3, started_at=1.0, encoding="utf-8")
    assert [part async for part in slot.fetch_output("c", 1)] == [OutputHeader(total_bytes=3, available_bytes=3, is_done=False), b"bc"]
    assert await slot.cancel_call("other") is False
    async with aclosing(slot.follow_output("c", 0, may_be_silent=True)) as parts:
        assert await anext(parts) == b"abc"
        assert await slot.cancel_call("c") is True
        last = await anext(parts)

    assert isinstance(last, ResultMessage)
    assert isinstance(await slot.call_status("c"), ResultMessage)
    assert len(await running) == 1
    with pytest.raises(CallUnknown):
        await slot.call_status("other")


async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def test_files_are_written_listed_and_read(client: AgentClient, agent: ScriptedAgent) -> None:
    slot = client.slot("0", 1)

    await slot.write_file("f", 0o600, chunks(b"ab", b"c"))
    await slot.write_archive("d", chunks(b"tar"))
    listing = await slot.list_folder(".", recursive=False, max_entries=1)

    assert [part async for part in slot.read_file("f")] == [b"abc"]
    assert [part async for part in slot.read_archive("d")] == [b"tar"]
    assert ([entry["path"] for entry in listing.entries], listing.is_truncated) == (["f"], True)
    assert agent.requests[0] == {"op": "file_put", "slot": "0", "epoch": 1, "path": "f", "mode": 0o600}
    assert "mode" not in agent.requests[1]
    with pytest.raises(PathNotFound):
        await anext(slot.read_file("none"))
    with pytest.raises(FileOperationFailed) as failed:
        await anext(slot.read_file("fifo"))
    assert failed.value.errno_name == "EINVAL"


@pytest.mark.parametrize(
    ("told", "is_whole"), [(3, True), (2, False), (4, False), (0, False), (-1, True), ("3", True), (True, True), (None, True), (1 << 60, True)]
)
async def test_a_file_must_have_the_size_that_the_agent_has_told(told: object, is_whole: bool) -> None:
    class TellingAgent(ScriptedAgent):
        def _file(self, peer: Any, stream: int, exchange: Any) -> None:
            peer.wire.send_item(stream, {"size_bytes": told})
            super()._file(peer, stream, exchange)

    agent = TellingAgent("s-1", slots=1)
    agent.files[("0", "f")] = b"abc"
    client = AgentClient(await FakeLink.to(agent, agent.token))
    sizes: list[int] = []
    parts: list[bytes] = []

    async def read() -> None:
        parts.extend([part async for part in client.slot("0", 1).read_file("f", sizes.append)])

    if is_whole:
        await read()
        assert (b"".join(parts), sizes) == (b"abc", [3] if told == 3 else [])
    else:
        with pytest.raises(FileOperationFailed, match="f does not have the size"):
            await read()
        assert (parts, sizes) == ([], [told])
    await client.close()


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("stale_epoch", SlotUnavailable),
        ("unknown_slot", SlotUnavailable),
        ("slot_unavailable", SlotUnavailable),
        ("not_implemented", NotSupportedByAgent),
        ("invalid", RequestInvalid),
        ("path_outside", RequestInvalid),
        ("file_not_found", PathNotFound),
        ("file_error", FileOperationFailed),
        ("call_not_found", CallUnknown),
        ("internal", AgentFailed),
        ("os.system", AgentFailed),
        (None, AgentFailed),
        (["invalid"], AgentFailed),
    ],
)
def test_every_code_has_its_class(code: object, kind: type[AgentRefused]) -> None:
    refused = agent_refusal({"code": code, "detail": "x" * 5000})

    assert type(refused) is kind
    assert refused.code == (code if isinstance(code, str) and code != "os.system" else "internal")
    assert len(refused.detail) == 2000


@pytest.mark.parametrize(
    ("meta", "sizes"),
    [
        ({"output_waits": True, "lens": [5]}, (5,)),
        ({"output_waits": True, "lens": [5, 6]}, (5, 6)),
        ({"output_waits": False, "lens": [5]}, None),
        ({"output_waits": True, "lens": []}, None),
        ({"output_waits": True, "lens": [1, 2, 3]}, None),
        ({"output_waits": True, "lens": [-1]}, None),
        ({"output_waits": True, "lens": [True]}, None),
        ({"output_waits": True, "lens": [1 << 40]}, None),
        ({"output_waits": True, "lens": "5"}, None),
    ],
)
def test_the_sizes_of_a_waiting_output_are_checked(meta: dict[str, Any], sizes: tuple[int, ...] | None) -> None:
    assert read_result_message(meta, b"").waiting_sizes_bytes == sizes


DIRTY: list[Callable[[dict[str, Any]], object]] = [
    lambda answer: answer.update(clean=False),
    lambda answer: answer.update(state="quarantined"),
    lambda answer: answer.update(left=["file"]),
    lambda answer: answer.update(clean="yes"),
]


@pytest.mark.parametrize("spoil", DIRTY)
def test_a_slot_is_verified_only_if_everything_in_the_report_says_so(spoil: Callable[[dict[str, Any]], object]) -> None:
    answer: dict[str, Any] = {"state": "ready", "clean": True, "left": [], "found": ["file"], "planted": [{"kind": "file", "detail": None}, 7]}
    assert read_verify_report(answer).is_clean

    spoil(answer)

    assert not read_verify_report(answer).is_clean
    assert [(item.kind, item.detail) for item in read_verify_report(answer).planted] == [("file", "")]
