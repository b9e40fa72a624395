"""Which lease holds which slot, and which acquires wait: plain data structures and rules, without I/O."""
