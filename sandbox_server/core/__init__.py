"""Values and rules without I/O: types, results, errors, state transitions, and who is to blame for a failure."""
