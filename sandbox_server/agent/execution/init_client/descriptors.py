"""How many open files slots and agent may have, and which errors of system calls are temporary.

The kernel counts, per user, the descriptors that are in flight on unix sockets, that is, sent and not yet received. It refuses a `sendmsg` if that count is
above the RLIMIT_NOFILE of the sending process. An agent that is not root has the same user as all its slots. The limit of a slot is therefore well below
that of the agent, so that the kernel refuses descriptors of slots long before those of the agent. The limits do not prevent a refusal in all cases: one
message can exceed them by up to 253 descriptors, and several messages sent at once by more. So the agent retries refused messages.
"""

from __future__ import annotations

import errno
import resource

TEMPORARY_ERRORS = frozenset({errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE})

_MAX_OF_SLOT = 4096
_MIN_OF_SLOT = 64
_OWN_RESERVE = 64  # what the agent needs apart from its slots: connections, folders, its standard streams
_MAX_DRAINS, _MIN_DRAINS = 256, 4
_MAX_PORT_CONNECTIONS, _MIN_PORT_CONNECTIONS = 64, 4


def agent_limit() -> int:
    """Return how many files this process may have open."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return soft if soft != resource.RLIM_INFINITY else 1 << 20


def slot_limit(own_limit: int) -> int:
    """Return how many files a process of a slot may have open, if the agent may have `own_limit`."""
    return max(_MIN_OF_SLOT, min(_MAX_OF_SLOT, own_limit // 4))


def max_drains(own_limit: int, slot_count: int) -> int:
    """Return how many pipes of ended calls the agent keeps reading for one slot: half of the slot's equal part of the agent's open files."""
    return max(_MIN_DRAINS, min(_MAX_DRAINS, (own_limit - _OWN_RESERVE) // slot_count // 2))


def max_port_connections(own_limit: int, slot_count: int) -> int:
    """Return how many connections to ports of one slot the agent keeps open at once: a quarter of the slot's equal part of the agent's open files."""
    return max(_MIN_PORT_CONNECTIONS, min(_MAX_PORT_CONNECTIONS, (own_limit - _OWN_RESERVE) // slot_count // 4))
