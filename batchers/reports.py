"""Reports of a batcher: seconds, bytes, and lost episodes."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from rlstruct.core import DictTensor, Layout


@dataclass(frozen=True)
class BatcherStats:
    """Wall-clock time of a batcher by activity, in seconds since its creation.

    Attributes:
        workers: for each worker (one when collecting in this process) the seconds spent in ``environment``, ``agent``,
            ``copy`` (writing the batch), ``reset``, ``start`` (creating agent and environments), ``update`` (of the
            agent's weights), ``save`` and ``load`` (of checkpoints), ``graph`` (launching a recorded batch) and
            ``wait`` (for orders), as of its last batch; they add up to the time that the worker has existed until then.
            Zeros before.
        wait: seconds that this process waited in `get`.
        hand_over: seconds that this process spent on copying finished batches out.
        batches: number of batches returned.
        pids: process id of each worker, for a debugger or profiler; none when collecting in this process or on a
            cluster.
        executors: what took each worker's steps in the last batch: ``"kernel"``, ``"graph"``, ``"compiled"`` or
            ``"eager"``; none before.
    """

    workers: tuple[dict[str, float], ...]
    wait: float
    hand_over: float
    batches: int
    pids: tuple[int, ...] = ()
    executors: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Spell the seconds as a table, one row per worker."""
        names = ("environment", "agent", "copy", "reset", "start", "update", "save", "load", "graph", "wait")
        rows = ["worker  " + "  ".join(f"{name:>11}" for name in names)]
        for index, seconds in enumerate(self.workers):
            rows.append(f"{index:>6}  " + "  ".join(f"{seconds.get(name, 0.0):>9.3f} s" for name in names))
        rows.append(f"this process: waited {self.wait:.3f} s, copied batches out for {self.hand_over:.3f} s")
        return "\n".join(rows)


@dataclass(frozen=True)
class MemoryReport:
    """Bytes that collecting takes, environments and agents not counted; all of them on the batcher's device.

    Attributes:
        slabs: for each worker, what batches of T steps are written into: one slab, and a second one once a batch was
            queued (see `RL_Batcher.execute`). Worker processes keep theirs in shared memory on the CPU; if they collect
            on another device, they keep as many again there.
        final_observations: for each worker, extra room for the final observations of environments that
            restart (on the CPU; elsewhere the slab has them). Each episode that ends makes one of them real memory.
        batch: one batch returned by `get`, all workers together; at most, where environments restart by themselves:
            without any restart ``_observation/`` shares the memory of ``observation/``.
        weights: the buffers through which weights travel to worker processes: 0 before the first `update`, then one
            copy of the weights; one more where `update` is called during a batch, and at most three.
        processes: for each worker process, and in the end for the server that they are forked from, what Linux counts
            as its memory at this moment, besides slabs and weights: Python, the modules of your script, environments
            and agent. What several of them share counts in parts. Not in `total`, nor in comparisons of reports.
    """

    slabs: tuple[int, ...]
    final_observations: tuple[int, ...]
    batch: int
    weights: int
    processes: tuple[int, ...] = field(default=(), compare=False)

    @property
    def total(self) -> int:
        """The peak, one batch being held: slabs, batch and weights."""
        return sum(self.slabs) + self.batch + self.weights


@dataclass(frozen=True)
class LostEpisodes:
    """A worker failed and was started again: the episodes that its environments were in are lost.

    Attributes:
        worker: its index.
        environments: global indices ``(first, last + 1)`` of its environments, which have begun new episodes.
        seed: the seed of the first of them until then.
        new_seed: its seed from then on, since the old one would play the same episodes again.
        batch: the batch, counted from 0, that holds the new episodes from their first step.
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


def report_memory(
    layouts: Sequence[Layout],
    infos: DictTensor,
    auto_reset: bool,
    weights: int,
    n_slabs: int,
    pids: Sequence[int],
) -> MemoryReport:
    """Build the report from the layout of one slab of each worker, and from agent_info and env_info, [B] together.

    Environments that restart (``auto_reset``) may need memory for ``_observation/`` besides that for ``observation/``.
    """
    finals = tuple(n_slabs * _named(layout, "reached/").nbytes() if "restarted" in layout else 0 for layout in layouts)
    slabs = tuple(n_slabs * layout.nbytes() - final for layout, final in zip(layouts, finals, strict=True))
    batch = sum(value.nbytes for value in infos.values())
    for layout in layouts:
        T, B = layout["running"].shape
        batch += _named(layout, "stream/", "action/", "state/").nbytes()
        batch += 4 * B * torch.int64.itemsize  # environment, env_seed, step and policy_version in its info
        if auto_reset:  # all but the random keys, which a restart leaves alone
            frames = {name: spec for name, spec in _named(layout, "stream/").items() if name != "stream/rng"}
            batch += Layout(frames).nbytes() * T // (T + 1)
    return MemoryReport(slabs, finals, batch, weights, _anonymous_bytes(pids))


def _anonymous_bytes(pids: Sequence[int]) -> tuple[int, ...]:
    """Return the bytes of these processes, and of the one that they come from if that is not this process."""
    try:
        servers = {kilobytes(pid, "status")["PPid"] for pid in pids} - {os.getpid()}
        return tuple(1024 * kilobytes(pid, "smaps_rollup")["Pss_Anon"] for pid in (*pids, *servers))
    except (OSError, KeyError):  # one has ended, or this is not Linux
        return ()


def kilobytes(*place: object) -> dict[str, int]:
    """Read the numbers in a file of /proc by name; sizes are in units of 1,024 bytes."""
    text = Path("/proc", *map(str, place)).read_text()
    return {name: int(number) for name, number in re.findall(r"^(\w+):\s+(\d+)", text, re.MULTILINE)}


def _named(layout: Layout, *prefixes: str) -> Layout:
    return Layout({name: spec for name, spec in layout.items() if name.startswith(prefixes)})
