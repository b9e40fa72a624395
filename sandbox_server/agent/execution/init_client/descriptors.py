"""How the open files that this agent may have are divided, and which errors of the system pass by themselves.

Descriptors under way on unix sockets are counted per user of the machine, and `sendmsg` is refused to whoever's own limit the count exceeds. Where the agent
is an ordinary user, all slots count as that user: so a slot's limit is well below the agent's, and what slots send is refused long before what the agent
sends. One message may carry 253 descriptors past a limit, and many that were admitted at once more than that, so the agent must cope with a refusal as well.
"""

from __future__ import annotations

import errno
import resource

TEMPORARY_ERRORS = frozenset({errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE})

_MOST_OF_SLOT = 4096
_LEAST_OF_SLOT = 64
_OWN_RESERVE = 64  # what the agent needs beside its slots: connections, folders, its own streams
_MOST_DRAINS, _LEAST_DRAINS = 256, 4


def agent_limit() -> int:
    """How many files this process may have open."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return soft if soft != resource.RLIM_INFINITY else 1 << 20


def slot_limit(own_limit: int) -> int:
    """How many files a process of a slot may have open, where the agent may have `own_limit`."""
    return max(_LEAST_OF_SLOT, min(_MOST_OF_SLOT, own_limit // 4))


def most_drains(own_limit: int, slots: int) -> int:
    """How many pipes the agent goes on reading for one slot after the calls that opened them: half of a slot's part of the agent's files."""
    return max(_LEAST_DRAINS, min(_MOST_DRAINS, (own_limit - _OWN_RESERVE) // slots // 2))
