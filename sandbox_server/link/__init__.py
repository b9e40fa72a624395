"""How the service talks to one agent: commands and files over frames, never lifecycle."""

from sandbox_server.link.agent_link import AgentLink, AgentStream
from sandbox_server.link.connect import connect
from sandbox_server.link.endpoint import Endpoint
from sandbox_server.link.errors import AgentRefused, AgentSilent, LinkError, LinkLost

__all__ = ["AgentLink", "AgentRefused", "AgentSilent", "AgentStream", "Endpoint", "LinkError", "LinkLost", "connect"]
