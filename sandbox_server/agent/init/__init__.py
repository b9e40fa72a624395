"""The first process of a slot (PID 1 in mode `bwrap`), and the modules that it imports. It imports nothing else of the agent."""
