"""The terminal of a lease: a tmux server in the slot, which the agent drives in control mode, and the recording of what it shows."""
