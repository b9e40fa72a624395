"""The agent's side of the conversation with the init of a slot."""
