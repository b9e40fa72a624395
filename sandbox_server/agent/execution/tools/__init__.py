"""The tools that calls can use: how their arguments are checked, and what a call of each does."""
