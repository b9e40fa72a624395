"""Which lease has which slot, and which sandboxes a pool has."""
