"""Rollouts on the slots of a sandbox service: the connection to a pool, the trajectories of a group, and what is recorded about them."""
