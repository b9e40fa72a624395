"""Scripts that run inside a slot, with whatever Python is there (3.8 or later) and its standard library alone.

They are sent with each call and read from standard input, so that nothing in the slot can replace them.
"""
