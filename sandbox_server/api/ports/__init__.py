"""Requests to programs that listen in slots: what of them reaches the program, and what of its answers reaches the client."""
