"""The tools: their arguments, and what each becomes."""
