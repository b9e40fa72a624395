"""The agent: the program that runs inside a sandbox, owns its slots, runs tool calls in them and serves their files.

It uses the standard library only, and runs on Python 3.8 and newer.
"""

AGENT_VERSION = "0.1.0"
