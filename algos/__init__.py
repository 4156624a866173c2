"""Algorithms on top of the batchers. Layer 4."""
