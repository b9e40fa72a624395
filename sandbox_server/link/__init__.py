"""How the service talks to one agent: a connection, and a typed client over it. Creating and destroying sandboxes is the task of `backends`."""

from sandbox_server.link.agent_client import AgentClient
from sandbox_server.link.agent_link import AgentLink
from sandbox_server.link.agent_stream import AgentStream
from sandbox_server.link.connect import connect
from sandbox_server.link.endpoint import AgentEndpoint
from sandbox_server.link.errors import AgentRefused, AgentSilent, LinkError, LinkLost

__all__ = ["AgentClient", "AgentEndpoint", "AgentLink", "AgentRefused", "AgentSilent", "AgentStream", "LinkError", "LinkLost", "connect"]
