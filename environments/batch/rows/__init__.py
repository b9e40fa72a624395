"""What a run writes: trajectories in ShareGPT form, and statistics about them."""
