"""A thread that deletes files."""

from __future__ import annotations

import logging
import os
import threading
from queue import SimpleQueue

log = logging.getLogger(__name__)


class FileDeleter:
    """Deletes files in a thread of its own.

    The garbage collector calls `delete`, and it can do so at any point of the program: even inside `ThreadPoolExecutor.submit`, which holds a
    lock that is not reentrant. `SimpleQueue.put` is documented to be safe in that case, so `delete` uses nothing else.
    """

    def __init__(self) -> None:
        self._paths: SimpleQueue[str | None] = SimpleQueue()
        self._closed = False
        # The thread is started at once: when slots have taken every process that the user may have, no other thread can be started.
        self._thread = threading.Thread(target=self._delete_queued, name="output-deleter", daemon=True)
        self._thread.start()

    def delete(self, path: str) -> None:
        """Queue a file for deletion; after `delete_remaining`, delete it at once."""
        if self._closed:
            _delete_file(path)
        else:
            self._paths.put(path)

    def delete_remaining(self) -> None:
        """Delete every queued file, and end the thread."""
        self._closed = True
        self._paths.put(None)
        self._thread.join()

    def _delete_queued(self) -> None:
        while True:
            path = self._paths.get()
            if path is None:
                return
            _delete_file(path)


def _delete_file(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        log.warning("the output file %s could not be deleted: %s", path, error)
