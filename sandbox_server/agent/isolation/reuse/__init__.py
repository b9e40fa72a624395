"""What an ended slot runtime leaves to the next one, because it is as a new one would get it, and making it anew would cost more than checking it."""
