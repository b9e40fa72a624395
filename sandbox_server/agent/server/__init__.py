"""The agent process: it listens, authenticates the service, and serves the operations that the service asks for."""
