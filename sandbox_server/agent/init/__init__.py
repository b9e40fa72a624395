"""The first process (PID 1) of a slot, and the modules that it imports. It imports nothing else of the agent."""
