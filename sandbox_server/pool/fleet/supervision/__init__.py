"""The tasks that create, connect, observe and destroy sandboxes. They report values to the pool and hold no reference to its state."""
