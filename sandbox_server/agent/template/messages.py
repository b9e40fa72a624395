"""What the agent and the template agree on: how the template is started, and the messages, what the agent asks for and what the template answers.

The agent sends one message that sets the template up, and then one for each slot. Both begin with a header and continue with a marshalled dict, because both
ends run the same interpreter and only the agent can write to the socket. Each gets one answer.
"""

from __future__ import annotations

import struct

#: The number of the request, and the `CLONE_NEW*` flags of the namespaces that the slot gets of its own. A marshalled dict follows.
REQUEST = struct.Struct("<II")
#: The number of the request, and the process id of the new init, or an errno as a negative number. The text of an error may follow.
ANSWER = struct.Struct("<Ii")
#: The environment variables of the template, besides those that its interpreter needs. The dynamic linker finds all functions at the start, not in each init
#: that is the first to call one of them.
ENVIRONMENT = {"LD_BIND_NOW": "1"}
MESSAGE_BYTES = 64 << 10
MAX_DESCRIPTORS = 128
