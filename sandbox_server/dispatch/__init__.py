"""From tool calls to results: which calls are accepted, how they run in order, and where their results are recorded."""
