"""Kernel interfaces that limit and observe slots: control groups, seccomp and /proc."""
