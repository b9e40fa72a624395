"""Terminals: interactive shells of a lease, each with a pseudo-terminal in the slot and any number of viewers."""
