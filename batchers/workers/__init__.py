"""Worker processes: `pool` and `handle` are the parent's half, `worker` is the process, the rest serves both."""
