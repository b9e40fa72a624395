"""What one slot may take of memory and disk: measured, decided, ended."""
