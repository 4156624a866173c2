"""What a batcher tells about itself: seconds, bytes, losses. Part of rlstruct.batchers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BatcherStats:
    """Where the wall-clock time of a batcher went, in seconds since its creation.

    Attributes:
        workers: for each worker (one when collecting in this process) the seconds spent in ``environment``, ``agent``,
            ``copy`` (writing the batch), ``reset``, ``start`` (creating agent and environments) and ``wait`` (for
            orders), as of its last batch; they add up to the time that the worker has existed until then.
        wait: seconds that this process waited in `get`.
        hand_over: seconds that this process spent on copying finished batches out.
        batches: how many were handed over.
    """

    workers: tuple[dict[str, float], ...]
    wait: float
    hand_over: float
    batches: int

    def __str__(self) -> str:
        """Spell the seconds as a table, one row per worker."""
        names = ("environment", "agent", "copy", "reset", "start", "wait")
        rows = ["worker  " + "  ".join(f"{name:>11}" for name in names)]
        for index, seconds in enumerate(self.workers):
            rows.append(f"{index:>6}  " + "  ".join(f"{seconds.get(name, 0.0):>9.3f} s" for name in names))
        rows.append(f"this process: waited {self.wait:.3f} s, copied batches out for {self.hand_over:.3f} s")
        return "\n".join(rows)


@dataclass(frozen=True)
class MemoryReport:
    """Bytes that a batcher holds on to, environments and agents not counted.

    Attributes:
        slabs: for each worker, the room for one batch. On the CPU the room for final observations becomes real memory
            only as far as episodes end.
        weights: the buffer through which weights travel to worker processes.
    """

    slabs: tuple[int, ...]
    weights: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self.slabs) + self.weights


@dataclass(frozen=True)
class LostEpisodes:
    """A worker failed and was started again: the episodes that its environments were in are lost.

    Attributes:
        worker: its index.
        environments: global indices ``(first, last + 1)`` of its environments, which have begun new episodes.
        seed: the seed of the first of them until then.
        new_seed: its seed from then on, since the old one would play the same episodes again.
        batch: how many batches had been handed over; the next one holds the new episodes from their first step.
        step: step inside the batch at which the worker failed.
        reason: message of the WorkerError.
    """

    worker: int
    environments: tuple[int, int]
    seed: int
    new_seed: int
    batch: int
    step: int
    reason: str
