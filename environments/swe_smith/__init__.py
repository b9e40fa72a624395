"""The tasks of SWE-smith: a repository with a bug in a slot, and its tests, which decide whether a model has fixed it."""
