"""Properties of the requests into which the gatherer divides calls."""

from __future__ import annotations

import asyncio
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from env_client.gatherer import MAX_REQUEST_BYTES, MAX_REQUEST_OUTPUT_BYTES, _GatheredCall, split_into_requests
from env_client.messages.calls import make_call

LOOP = asyncio.new_event_loop()
LOOP.close()

submitted_calls = st.lists(
    st.tuples(st.integers(0, 9), st.integers(2, MAX_REQUEST_BYTES // 3), st.booleans(), st.none() | st.integers(1, 10 << 20)), max_size=60
)  # fmt: skip


def gathered_call(lease: int, args_bytes: int, alone: bool, output_limit_bytes: int | None) -> _GatheredCall:
    call = make_call(f"l-{lease}", "terminal", {}, output_limit_bytes=output_limit_bytes)
    future: asyncio.Future[object] = asyncio.Future(loop=LOOP)
    return _GatheredCall(call=call, tool_from_program=False, args_bytes=args_bytes, needs_own_request=alone, submitted_s=0.0, future=future)  # type: ignore[arg-type]


@given(submitted_calls, st.integers(1, 20))
def test_each_call_is_in_one_request_and_no_request_is_too_large(submitted: list[tuple[int, int, bool, int | None]], max_batch_size: int) -> None:
    calls = [gathered_call(*one) for one in submitted]

    requests = split_into_requests(calls, max_batch_size)

    assert Counter(id(call) for request in requests for call in request) == Counter(map(id, calls))
    for request in requests:
        assert 1 <= len(request) <= max_batch_size
        assert len({one.call.lease_id for one in request}) == len(request)
        assert len(request) == 1 or not any(one.needs_own_request for one in request)
        assert len(request) == 1 or sum(one.args_bytes for one in request) <= MAX_REQUEST_BYTES
        assert len(request) == 1 or sum(one.call.output_limit_bytes or 50_000 for one in request) <= MAX_REQUEST_OUTPUT_BYTES
