"""The agent's side of the control socket to the init of a slot."""
