"""A model of a few hundred parameters that chooses a command for a prompt: its policy, its server, and the arithmetic of GRPO."""
