"""Thread pools whose threads run from the start.

`ThreadPoolExecutor` starts a thread when work comes that no idle one takes. Where the service shares its user with slots, their processes may by then
have taken all that this user may have, and the work would fail with "can't start new thread": also the work that ends those processes.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from sandbox_server.core.cleanup import cleanup_on_failure


def start_thread_pool(thread_count: int, name: str) -> ThreadPoolExecutor:
    """Make a thread pool that never starts another thread.

    Args:
        thread_count: how many threads it has.
        name: the beginning of the threads' names.

    Returns:
        The pool, all of whose threads run.

    Raises:
        RuntimeError: the machine, or the limit of this user, has no room for so many threads.
    """
    pool = ThreadPoolExecutor(thread_count, name)
    all_run = threading.Barrier(thread_count + 1)
    with cleanup_on_failure(lambda: pool.shutdown(wait=False)), cleanup_on_failure(all_run.abort):
        for _ in range(thread_count):  # each waits until all run, so that none takes the work of another
            pool.submit(all_run.wait)
        all_run.wait()
    return pool
