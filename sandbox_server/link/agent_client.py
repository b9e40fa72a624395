"""The requests to one agent. Together with `slot_client`, the only place that builds the agent's messages and reads its answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from sandbox_server.agent import wire
from sandbox_server.link.agent_link import RESPONSE_TIMEOUT_S, AgentLink
from sandbox_server.link.agent_reports import (
    AgentReport,
    ResetReport,
    SlotsUpdate,
    VerifyReport,
    announces_end_of_agent,
    read_agent_capability,
    read_agent_report,
    read_reset_report,
    read_slots_update,
    read_verify_report,
)
from sandbox_server.link.errors import AgentFailed, ReadOnlyNotSupported
from sandbox_server.link.slot_client import SlotClient


class AgentClient:
    """Sends requests to one agent and returns checked values.

    Args:
        link: the connection to the agent. The client has no state of its own, so that several clients may share a link.
        response_timeout_s: for how long the agent may be silent while it owes a response that it can give at once, in seconds.

    Every request raises LinkLost where the connection ends before the response, and a subclass of AgentRefused where the agent refuses.
    """

    def __init__(self, link: AgentLink, response_timeout_s: float = RESPONSE_TIMEOUT_S) -> None:
        self.link = link
        self._response_timeout_s = response_timeout_s

    @property
    def is_connected(self) -> bool:
        """Whether the connection to the agent stands."""
        return not self.link.closed.done()

    async def close(self) -> None:
        """Close the connection and wait until it is closed."""
        await self.link.close()

    def slot(self, slot_id: str, epoch: int) -> SlotClient:
        """The client for the calls and files of one slot.

        Args:
            slot_id: the id of the slot at its agent.
            epoch: the epoch in which the caller holds the slot.
        """
        return SlotClient(self.link, slot_id, epoch, self._response_timeout_s)

    def report(self, sandbox_id: str) -> AgentReport:
        """What the agent reported about itself when the link was made.

        Args:
            sandbox_id: the sandbox that the agent must belong to.

        Raises:
            AgentProtocolError: the agent belongs to another sandbox, or its hello is not valid.
        """
        return read_agent_report(self.link.hello, sandbox_id)

    async def watch_slots(self, sandbox_id: str) -> AsyncGenerator[SlotsUpdate, None]:
        """Receive the state of every slot, and each change from then on, until the agent ends the stream or the link is lost.

        Args:
            sandbox_id: the sandbox of the agent.

        Raises:
            AgentProtocolError: the agent sent something that is no update.
        """
        async with self.link.stream({"op": "watch"}) as stream:
            async for event in stream:
                if isinstance(event, wire.Item):
                    self.link.agent_ends = self.link.agent_ends or announces_end_of_agent(event.meta)
                    yield read_slots_update(event.meta, sandbox_id)

    async def reset_slot(self, slot_id: str, epoch: int, *, has_network: bool, keeps_files: bool) -> ResetReport:
        """Reset a slot. Resetting it twice to the same epoch is resetting it once.

        Args:
            slot_id: the id of the slot at its agent.
            epoch: the epoch of the slot after the reset.
            has_network: whether the slot has a network after the reset.
            keeps_files: whether the files of the slot stay.
        """
        answer = await self._request("reset", slot_id, epoch, network=has_network, keep=keeps_files)
        return read_reset_report(answer)

    async def verify_slot(self, slot_id: str, epoch: int, *, has_network: bool) -> VerifyReport:
        """Put leftovers of every kind into a free slot, reset it, and report which of them the reset found.

        Args:
            slot_id: the id of the slot at its agent.
            epoch: the epoch of the slot after the reset.
            has_network: whether the slot has a network after the reset.

        Raises:
            NotSupportedByAgent: the agent has no such self-test.
        """
        return read_verify_report(await self._request("verify", slot_id, epoch, network=has_network))

    async def equip_slot(self, slot_id: str, epoch: int, *, has_network: bool, cache_key: str, allow_hosts: Sequence[str] | None = None) -> None:
        """Give a slot a shared cache, and take the network away where the slot shall have none.

        Args:
            slot_id: the id of the slot at its agent.
            epoch: the epoch in which the slot is held.
            has_network: whether the slot keeps its network.
            cache_key: the cache; the agent creates it where it does not exist.
            allow_hosts: the only hosts that the slot may reach; None where the lease has no such list.

        Raises:
            NotSupportedByAgent, RequestInvalid: the isolation mode of the slot cannot do this.
        """
        await self._request("equip", slot_id, epoch, None, cache=cache_key, network=has_network, **_hosts_field(allow_hosts))

    async def narrow_slot(
        self,
        slot_id: str,
        epoch: int,
        *,
        has_network: bool,
        cache_key: str | None,
        read_only: Sequence[str] = (),
        allow_hosts: Sequence[str] | None = None,
        expects_prompt_response: bool = False,
    ) -> None:
        """Take rights away from a slot. Narrowing it twice is narrowing it once.

        Args:
            slot_id: the id of the slot at its agent.
            epoch: the epoch in which the slot is held.
            has_network: whether the slot keeps its network.
            cache_key: the cache that the slot keeps; None where it keeps none.
            read_only: the entries at the top of the workspace that the slot cannot change from now on.
            allow_hosts: see `equip_slot`.
            expects_prompt_response: raise AgentSilent where the agent is silent for `response_timeout_s`, instead of waiting until the link is lost.

        Raises:
            AgentSilent: see `expects_prompt_response`.
            ReadOnlyNotSupported: the agent cannot make entries of a workspace read-only.
            NotSupportedByAgent, RequestInvalid: the isolation mode of the slot cannot do this.
            PathNotFound, FileOperationFailed: an entry of `read_only` does not exist, or cannot be made read-only. Nothing was taken away.
        """
        silence_s = self._response_timeout_s if expects_prompt_response else None
        rights = {"network": has_network, "cache": cache_key, **_hosts_field(allow_hosts)}
        if not read_only:
            await self._request("narrow", slot_id, epoch, silence_s, **rights)
            return
        if read_agent_capability(self.link.hello, "read_only") is not True:
            raise ReadOnlyNotSupported
        answer = await self._request("narrow", slot_id, epoch, silence_s, **rights, read_only=list(read_only))
        confirmed = answer.get("read_only")
        if not isinstance(confirmed, list) or not set(read_only).issubset(map(str, confirmed)):
            raise AgentFailed({"code": "internal", "detail": "the agent did not confirm that the entries are read-only"})

    async def wait_until_quiet(self, slot_id: str, epoch: int) -> bool:
        """Wait until no call runs in a slot.

        Returns:
            Whether a call was running when the request arrived.
        """
        answer = await self._request("quiet", slot_id, epoch)
        return answer.get("ran") is not False

    async def drop_cache(self, cache_key: str) -> None:
        """Delete a shared cache.

        Raises:
            NotSupportedByAgent: the agent has no caches.
            AgentRefused: a slot that used the cache is being reset; the request can be repeated later.
        """
        await self.link.request({"op": "cache_drop", "cache": cache_key})

    async def _request(self, op: str, slot_id: str, epoch: int, silence_s: float | None = None, **fields: Any) -> Mapping[str, Any]:
        return await self.link.request({"op": op, "slot": slot_id, "epoch": epoch, **fields}, silence_s)


def _hosts_field(allow_hosts: Sequence[str] | None) -> dict[str, list[str]]:
    return {} if allow_hosts is None else {"allow_hosts": list(allow_hosts)}
