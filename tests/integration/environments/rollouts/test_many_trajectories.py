"""Tests of many concurrent trajectories: all of them are scored, and nothing is left."""

from __future__ import annotations

from env_client import SandboxClient
from environments.rollouts.pool_spec import PoolRequest
from environments.rollouts.service import ConnectionSettings
from tests.bench.rollout_overhead import measure
from tests.support.service import Service

#: The connections that the client keeps open are of different numbers after different rounds.
DESCRIPTORS_THAT_MAY_COME = 16


async def test_many_trajectories_are_complete_and_leave_nothing(service: Service) -> None:
    settings = ConnectionSettings(sandbox_url=service.url, sandbox_token=service.token)
    spec = {"slots_per_sandbox": 4, "min_sandboxes": 0, "max_sandboxes": 1}
    request = PoolRequest(name="few-slots", spec=spec, acquire_timeout_s=60)
    report = await measure(request, settings, group_count=3, group_size=4, rounds=1, calls=2)  # more than the pool has slots
    with SandboxClient(service.url, service.token) as client:
        client.pool_delete("few-slots", force=True)

    assert report.fault_count == 0
    assert report.scored_count == report.expected_count == 36
    assert report.tool_call_count == report.expected_call_count == 48
    assert (report.lease_count, report.task_growth) == (0, 0)
    assert report.descriptor_growth <= DESCRIPTORS_THAT_MAY_COME
