"""How the service talks to one agent: commands and files over frames, never lifecycle."""

from sandbox_server.link.agent_link import AgentLink, AgentStream
from sandbox_server.link.errors import AgentRefused, LinkError, LinkLost

__all__ = ["AgentLink", "AgentRefused", "AgentStream", "LinkError", "LinkLost"]
