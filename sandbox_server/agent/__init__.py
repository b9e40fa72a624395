"""The agent: runs inside a sandbox, owns its slots, runs tool calls, serves files. Standard library only, Python 3.8 and newer."""

AGENT_VERSION = "0.1.0"
