"""What separates the slots of one sandbox: probe a mode, start a slot's body in it, end it and prove its end."""
