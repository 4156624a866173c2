"""Worker processes: `pool` and `handle` run in the parent, `worker` in the worker, the other modules in both."""
