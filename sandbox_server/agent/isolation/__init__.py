"""The isolation modes: how the processes of a slot are separated from other slots and from the machine."""
