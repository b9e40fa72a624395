"""Who has which slot, and who waits: plain data and rules, no I/O."""
