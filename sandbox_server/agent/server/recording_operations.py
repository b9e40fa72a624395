"""The operation that sends the recording of a lease's terminal."""

from __future__ import annotations

import os
from typing import Any

from sandbox_server.agent.errors import Refused
from sandbox_server.agent.execution.tmux.recording import RECORDING_NAME
from sandbox_server.agent.server.connections import Stream
from sandbox_server.agent.slots.slots import AgentSlot

_CHUNK_BYTES = 64 << 10


async def send_recording(stream: Stream, slot: AgentSlot, name: Any) -> None:
    """Send the size of a recording, and the recording as it is now. What is recorded meanwhile is left out.

    Raises:
        Refused: the lease has no recording with this name.
    """
    path = slot.lease.tmux.recording.path
    if name != RECORDING_NAME or path is None:
        raise Refused("file_not_found", "the lease has no recording %s; a result of the tool tmux names one in metadata.recording" % ascii(name)[:100])
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise Refused("file_error", "the recording cannot be read: %s" % error.strerror) from None
    try:
        size_bytes = os.fstat(fd).st_size
        stream.send_item({"size_bytes": size_bytes})
        for start in range(0, size_bytes, _CHUNK_BYTES):
            if not await stream.send_data(os.pread(fd, min(_CHUNK_BYTES, size_bytes - start), start)):
                return
    finally:
        os.close(fd)
    stream.end_stream()
