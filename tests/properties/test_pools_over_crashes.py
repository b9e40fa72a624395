"""Random histories of whole pools with crashes of the service. `POOL_LIVES=1000` runs that many histories; the default is smaller."""

from __future__ import annotations

import asyncio
import os

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.properties.pools_machine import live

LIVES = int(os.environ.get("POOL_LIVES", "40"))
STEPS = 25


@pytest.mark.timeout(900)
# A history is long, so that shrinking one would take minutes: the seed that hypothesis prints brings it back.
@settings(max_examples=LIVES, phases=(Phase.generate,), print_blob=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**64 - 1))
def test_nothing_promised_is_lost_over_any_deaths(seed):
    asyncio.run(live(seed, STEPS))
