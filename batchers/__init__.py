"""Batchers: run an agent in many environments, in this process or in many. Layer 3."""

from rlstruct.batchers.batcher import BatcherStats, MemoryReport, RL_Batcher

__all__ = ["BatcherStats", "MemoryReport", "RL_Batcher"]
