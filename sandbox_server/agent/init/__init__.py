"""PID 1 of a slot, and what it imports. Nothing else may be imported here."""
