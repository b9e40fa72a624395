"""Slots: their states, runtimes, transitions, caches, probes and self-test."""
