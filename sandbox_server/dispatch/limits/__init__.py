"""How many calls of a tenant run at once, and how much the responses of all requests may hold."""
