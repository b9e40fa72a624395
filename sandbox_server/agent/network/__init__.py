"""The network `internet`: a network namespace for each slot, behind a router with a filter and a resolver that belong to the agent."""
