"""The messages between the agent and its network process: JSON in packets, and descriptors beside them. Each request gets one answer, in order."""

from __future__ import annotations

#: The largest message in bytes. Two lists of `allow_hosts` with their most and longest entries fit.
MESSAGE_BYTES = 1 << 18
#: The operations: a network for a slot, the end of one, and less of what a slot may reach.
MAKE, RELEASE, LIMIT = "make", "release", "limit"
