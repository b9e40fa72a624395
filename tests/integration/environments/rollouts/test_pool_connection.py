"""Tests of the connection to a pool with a real service: pools that are made, found and made again; runs that leave no slot; one sentence for each failure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from env_client import AsyncSandboxClient, RetryPolicy
from environments.rollouts.exec_tool import RolloutFault
from environments.rollouts.pool_spec import PoolRequest, PoolSettings, plan_pool
from environments.rollouts.service import ConnectionSettings, PoolConnection, PoolUnavailable
from tests.support.service import SMALL_POOL, Service

DEFAULT_POOL = PoolRequest(name="default", spec=None, acquire_timeout_s=30)


def connection(service: Service, request: PoolRequest = DEFAULT_POOL, **options: object) -> PoolConnection:
    return PoolConnection(request, ConnectionSettings(sandbox_url=service.url, sandbox_token=service.token, **options))  # type: ignore[arg-type]  # of the tests


@pytest.fixture
async def client(service: Service) -> AsyncIterator[AsyncSandboxClient]:
    async with AsyncSandboxClient(service.url, service.token) as opened:
        yield opened


async def test_hooks_run_tools_in_a_slot_and_in_a_fresh_one(service: Service) -> None:
    async with connection(service) as pool:
        async with pool.slot("t-1") as lease:
            exec_tool = pool.make_exec_tool(lease)
            assert lease.info.cache == "rw"
            await exec_tool("write_file", {"path": "a.txt", "content": "x"})
            async with exec_tool.fresh_slot() as fresh:
                assert fresh.lease.lease_id != lease.lease_id
                assert (await fresh("terminal", {"command": "ls"})).output == ""
            assert fresh.lease.info.run_id == pool.run_id
            assert (await exec_tool.narrow(cache="none")).cache == "none"
            assert (await exec_tool("terminal", {"command": "cat a.txt; exit 3"}, timeout=None)).metadata["exit_code"] == 3
            await pool.client.release([lease.lease_id])
            with pytest.raises(RolloutFault) as fault:
                await exec_tool("terminal", {"command": "true"})
        assert (fault.value.reason, fault.value.fault) == ("lease_lost", "ambiguous")


async def test_the_end_of_a_connection_releases_its_run(service: Service, client: AsyncSandboxClient) -> None:
    async with connection(service) as pool:
        await pool.acquire(["t-1", "t-2"])
        assert len((await client.leases(run_id=pool.run_id)).leases) == 2
    assert (await client.leases(run_id=pool.run_id)).leases == ()
    with pytest.raises(RolloutFault, match="run has ended"):
        await pool.acquire(["t-3"])


async def test_a_pool_that_was_deleted_is_made_again(service: Service, client: AsyncSandboxClient) -> None:
    request = plan_pool(PoolSettings(slots_per_container=2, max_containers=1))
    async with connection(service, request) as pool:
        assert pool.pool_info.spec["delete_after_idle_s"] == 900
        await client.pool_delete(request.name)
        async with pool.slot("t-1") as lease:
            assert lease.info.pool == request.name
    await client.pool_delete(request.name)


async def test_a_cancelled_acquire_leaves_no_slot(service: Service, client: AsyncSandboxClient) -> None:
    async with connection(service) as pool:
        for delay_s in (0.0, 0.001, 0.003, 0.006):
            acquire = asyncio.create_task(pool.acquire([f"t-{delay_s}"]))
            await asyncio.wait({acquire}, timeout=delay_s)
            acquire.cancel()
            with suppress(asyncio.CancelledError):
                await pool.release(await acquire)  # the acquire was faster
        assert (await client.leases(run_id=pool.run_id)).leases == ()


@pytest.mark.parametrize(
    ("url", "token", "request_", "sentence"),
    [
        ("http://127.0.0.1:9", "x", DEFAULT_POOL, "sandbox_url: no sandbox service answers at http://127.0.0.1:9; start one there"),
        ("nowhere", "x", DEFAULT_POOL, "sandbox_url: the service's address must start with http://"),
        (None, "wrong", DEFAULT_POOL, "sandbox_token: the service at .* does not accept the token"),
        (None, None, PoolRequest(name="none", spec=None, acquire_timeout_s=1), "sandbox_pool: the service at .* has no pool 'none'; it has default"),
        (None, None, plan_pool(PoolSettings(tool_pool_mode="modal")), "modal"),
        (None, None, plan_pool(PoolSettings(tool_pool_mode="nomad")), "nomad"),
        (None, None, plan_pool(PoolSettings(slots_per_container=0)), "slots_per_sandbox"),
    ],
)
async def test_a_run_without_its_pool_ends_in_one_sentence(service: Service, url: str | None, token: str | None, request_: PoolRequest, sentence: str) -> None:
    # One retry is enough to see how the retries end; by default they go on for ten seconds where no connection was made before.
    settings = ConnectionSettings(sandbox_url=url or service.url, sandbox_token=token or service.token, retry=RetryPolicy(first_connect_s=0.2))
    with pytest.raises(PoolUnavailable, match=sentence) as refused:
        await PoolConnection(request_, settings).open()
    assert "\n" not in str(refused.value)


async def test_a_gang_that_the_pool_can_never_hold_ends_the_run(service: Service) -> None:
    async with connection(service) as pool:
        with pytest.raises(PoolUnavailable, match="default"):
            await pool.acquire([f"t-{number}" for number in range(1000)])


async def test_a_pool_that_needs_a_terminal_which_its_slots_lack_ends_the_run(service: Service) -> None:
    async with connection(service) as pool:
        await pool.client.pool_put("strict", {**SMALL_POOL, "require_stateful_sandbox": True, "env_vars": {"PATH": "/without/tmux"}})
    strict = PoolConnection(
        PoolRequest(name="strict", spec=None, acquire_timeout_s=20), ConnectionSettings(sandbox_url=service.url, sandbox_token=service.token)
    )
    async with strict as pool:
        with pytest.raises(PoolUnavailable, match=r"require_stateful_sandbox, and this agent lacks tmux \(the tool tmux needs the program tmux"):
            await pool.acquire(["t-1"])
        await pool.client.pool_delete("strict")


async def test_an_embedded_service_ends_with_the_connection() -> None:
    async with PoolConnection(plan_pool(PoolSettings(max_containers=1))) as pool:
        async with pool.slot("t-1") as lease:
            assert (await pool.make_exec_tool(lease)("terminal", {"command": "echo hi"})).output == "hi\n"
        assert "terminal" in await pool.fetch_available_tools()
    with pytest.raises(PoolUnavailable, match="set sandbox_url"):
        await PoolConnection(DEFAULT_POOL).open()
