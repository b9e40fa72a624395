"""Guards that measure how much memory and disk the slots use, and end a slot that uses too much."""
