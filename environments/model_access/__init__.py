"""Access to model servers: whether they answer, and the tokens of what they saw and wrote."""
