"""Requests and responses of the service as plain values: no I/O."""
