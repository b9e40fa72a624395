"""The sandboxes of a pool: the plan, the supervisors, the creation budget."""
