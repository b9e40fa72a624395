"""The template of slots: a process, prepared once per agent, that forks the inits of slots. It imports `init` and nothing else of the agent."""
