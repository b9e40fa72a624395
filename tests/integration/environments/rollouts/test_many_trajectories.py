"""Tests of many concurrent trajectories: all of them are scored, and nothing is left."""

from __future__ import annotations

from environments.rollouts.pool_spec import PoolRequest
from environments.rollouts.service import ConnectionSettings
from tests.bench.rollout_overhead import measure
from tests.support.service import Service

#: The connections that the client keeps open are of different numbers after different rounds.
DESCRIPTORS_THAT_MAY_COME = 16


async def test_many_trajectories_are_complete_and_leave_nothing(service: Service) -> None:
    settings = ConnectionSettings(sandbox_url=service.url, sandbox_token=service.token)
    request = PoolRequest(name="default", spec=None, acquire_timeout_s=60)
    report = await measure(request, settings, group_count=6, group_size=4, rounds=1, calls=2)  # more than the pool has slots

    assert report.fault_count == 0
    assert report.scored_count == report.expected_count == 72
    assert report.tool_call_count == report.expected_call_count == 96
    assert (report.lease_count, report.task_growth) == (0, 0)
    assert report.descriptor_growth <= DESCRIPTORS_THAT_MAY_COME
