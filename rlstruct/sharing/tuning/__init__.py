"""Search for the fastest number of workers, environments and steps."""
