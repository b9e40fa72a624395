"""The slots of a sandbox: their states and transitions, the runtimes they get, shared caches, and the verification of resets."""
