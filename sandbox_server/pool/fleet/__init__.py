"""The sandboxes of a pool: which there should be, and what follows from what was observed. The tasks in `supervision` carry it out."""
