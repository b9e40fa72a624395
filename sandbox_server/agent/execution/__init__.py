"""Running tool calls in a slot: the calls and jobs of a lease, their processes and their outputs."""
