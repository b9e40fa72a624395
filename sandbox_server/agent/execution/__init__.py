"""One tool call, from what is asked to its result: processes, output, journal, jobs."""
