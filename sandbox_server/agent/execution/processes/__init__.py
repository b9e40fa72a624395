"""One process tree in a slot: how it is started, its pipes, and how it is ended."""
