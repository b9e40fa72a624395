"""How messages are sent: connections, retries, heartbeats."""
