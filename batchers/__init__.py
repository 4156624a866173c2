"""Collection of trajectories in this process or in several. Layer 3."""
