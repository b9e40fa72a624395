"""Run-batches: many programs, each in a fresh slot of its own, in one request."""
