"""What the route of run-batches needs besides the other routes: its body, and its part of the service."""
