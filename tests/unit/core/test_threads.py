"""Thread pools whose threads run from the start."""

from __future__ import annotations

import threading

from sandbox_server.core.threads import start_thread_pool


def thread_count() -> int:
    return sum(thread.name.startswith("from-the-start") for thread in threading.enumerate())


def test_every_thread_runs_before_there_is_work_and_no_other_is_started_for_it() -> None:
    release = threading.Event()
    with start_thread_pool(3, "from-the-start") as pool:
        assert thread_count() == 3
        results = [pool.submit(release.wait, 30) for _ in range(5)]
        assert thread_count() == 3
        release.set()
        assert all(result.result() for result in results)
