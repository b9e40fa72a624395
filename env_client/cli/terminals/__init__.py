"""A terminal of a slot on the local terminal, for `sandbox shell` and `sandbox attach`."""
