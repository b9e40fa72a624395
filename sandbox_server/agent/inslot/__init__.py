"""Code that runs inside a slot with the rights of the slot: file tools, file routes, archives, and the probe that verifies a reset."""
