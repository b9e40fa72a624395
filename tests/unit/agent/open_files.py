"""A process that has no descriptors left."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def only_so_many_new_files(count: int) -> Iterator[None]:
    """Let this process open only so many further files.

    Args:
        count: how many.
    """
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free: list[int] = []
    try:
        while len(free) <= count:
            free.append(os.dup(0))
    finally:
        for fd in free:
            os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[-1], limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
