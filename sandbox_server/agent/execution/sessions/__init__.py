"""Stateful shells: the sessions of a lease, their shells, and the calls that run in them."""
