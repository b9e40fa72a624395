"""The state of the service that outlives a crash: the records, and the stores that keep them."""
