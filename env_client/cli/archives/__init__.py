"""Packing a local folder into a gzipped tar, and unpacking one that comes from a slot."""
