"""Finds out which isolation modes work, and keeps for other agents of the machine what it has found."""
