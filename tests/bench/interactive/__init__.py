"""What agents do all day in a slot that they hold: shells that stay, and a network of their own."""
