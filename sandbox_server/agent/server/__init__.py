"""The agent process: connections, authentication, operations."""
