"""Sending messages: connections, retries, resumed streams and the heartbeat that renews leases."""
