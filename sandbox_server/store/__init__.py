"""What survives a crash: records, and the stores that keep them."""
