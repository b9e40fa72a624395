"""The messages between the agent and the template: what the agent asks for, and what the template answers.

The agent sends one message that sets the template up, and then one for each slot. Both begin with a header and continue with a marshalled dict, because both
ends run the same interpreter and only the agent can write to the socket. Each gets one answer.
"""

from __future__ import annotations

import struct

#: The number of the request, and the `CLONE_NEW*` flags of the namespaces that the slot gets of its own. A marshalled dict follows.
REQUEST = struct.Struct("<II")
#: The number of the request, and the process id of the new init, or an errno as a negative number. The text of an error may follow.
ANSWER = struct.Struct("<Ii")
MESSAGE_BYTES = 64 << 10
MAX_DESCRIPTORS = 128
