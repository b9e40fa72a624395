"""Resolves names for slots: the messages, the name servers of the machine, and the resolver that slots ask."""
