"""The messages between the agent and init: the layout and the kinds of the reports of init, and the limits of one message."""

from __future__ import annotations

import struct

#: Kind, number of the request or process tree, status, processor time in microseconds, resident memory in KiB. A text may follow.
REPORT = struct.Struct("<cIiQQ")
READY, FAILED, EXITED, REFUSED, SIGNALLED, MOVED = b"R", b"F", b"X", b"E", b"S", b"M"
#: The format of requests. With a later one, an init would use the texts of its template that a request contains, too, and so change memory that it shares.
MARSHAL_VERSION = 2
CONFIG_BYTES = 160 << 10  # The largest first message, which is the configuration.
#: The largest later message. For a longer one Python would map and unmap memory each time, so a longer request is sent as a file in memory.
REQUEST_BYTES = 16 << 10
MAX_DESCRIPTORS = 8
