"""What limits how many calls run, and how much their responses may hold."""
