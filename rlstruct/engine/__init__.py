"""Ways to run a pure step of tensors: as it is, compiled, or recorded as a graph."""
