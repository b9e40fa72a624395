"""Running the calls of one lease: the queue, the decisions, and the task that carries them out."""
