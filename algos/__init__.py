"""Algorithms on top of the batchers. Layer 4: `rlstruct.algos.reinforce` is the first to read."""
