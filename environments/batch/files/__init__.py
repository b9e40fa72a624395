"""The files of a run: the prompts that it reads, and the folder that it writes."""
