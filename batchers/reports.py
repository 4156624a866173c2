"""Reports of a batcher: seconds, bytes, and lost episodes."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from rlstruct import renamed
from rlstruct.core import DictTensor, Layout


@renamed.members
@dataclass(frozen=True)
class BatcherStats:
    """Wall-clock time of a batcher by activity, in seconds since its creation.

    Attributes:
        workers: for each worker (one when collecting in this process) the seconds spent in ``environment``, ``agent``,
            ``copy`` (writing the batch), ``reset``, ``start`` (creating agent and environments), ``update`` (of the
            agent's weights), ``save`` and ``load`` (of checkpoints), ``graph`` (launching a captured batch) and
            ``wait`` (for orders). They add up to the worker's lifetime until its last batch, and are 0 before the
            first.
        wait: seconds that this process waited in `get`.
        assembly: seconds that this process spent copying finished batches.
        batches: number of batches returned.
        pids: process id of each worker that has been forked, for a debugger or profiler; empty when collecting in this
            process or on a cluster.
        executors: executor of each worker's last batch: ``"kernel"``, ``"graph"``, ``"compiled"`` or ``"eager"``;
            empty before the first batch.
    """

    workers: tuple[dict[str, float], ...]
    wait: float
    assembly: float
    batches: int
    pids: tuple[int, ...] = ()
    executors: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Format the seconds as a table with one row per worker."""
        names = ("environment", "agent", "copy", "reset", "start", "update", "save", "load", "graph", "wait")
        rows = ["worker  " + "  ".join(f"{name:>11}" for name in names)]
        for index, seconds in enumerate(self.workers):
            rows.append(f"{index:>6}  " + "  ".join(f"{seconds.get(name, 0.0):>9.3f} s" for name in names))
        rows.append(f"this process: waited {self.wait:.3f} s, copied batches out for {self.assembly:.3f} s")
        return "\n".join(rows)


@renamed.members
@dataclass(frozen=True)
class MemoryReport:
    """Bytes used for collecting, without environments and agents, on the batcher's device.

    Attributes:
        rollout_buffers: for each worker, the memory that batches of T steps are written to: one buffer, and a second
            one once a batch has been queued (see `RL_Batcher.execute`). Worker processes have theirs in shared memory
            on the CPU, and as many again on another device if they collect there.
        final_observations: for each worker, reserved memory for the final observations of auto-resetting environments
            (on the CPU; elsewhere the buffer has them). Only the part for episodes that end is really used.
        batch: one batch returned by `get`, of all workers together. For auto-resetting environments this is an upper
            bound: without restarts ``_observation/`` shares the memory of ``observation/``.
        weights: buffers for weights on their way to worker processes: 0 before the first `update`, then one copy of
            the weights, another one if `update` is called during a batch, and at most three.
        processes: for each worker process, and last for the server that they are forked from, its present memory
            according to Linux, without buffers and weights: Python, the modules of your script, environments and agent.
            Shared memory is divided among processes. Not part of `total` or of comparisons of reports.
    """

    rollout_buffers: tuple[int, ...]
    final_observations: tuple[int, ...]
    batch: int
    weights: int
    processes: tuple[int, ...] = field(default=(), compare=False)

    @property
    def total(self) -> int:
        """Peak while you hold one batch: buffers, batch and weights."""
        return sum(self.rollout_buffers) + self.batch + self.weights


@dataclass(frozen=True)
class LostEpisodes:
    """Episodes lost because a worker failed and was restarted.

    Attributes:
        worker: index of the worker.
        environments: global indices ``(first, last + 1)`` of its environments, which have started new episodes.
        seed: seed of the first of them before the restart.
        new_seed: its seed since then; the old one would repeat the same episodes.
        batch: index of the batch, from 0, that begins with the new episodes.
        step: step in the batch at which the worker failed.
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
    layouts: Sequence[Layout], infos: DictTensor, auto_reset: bool, weights: int, n_buffers: int, pids: Sequence[int]
) -> MemoryReport:
    """Compute the report from the layout of one buffer per worker, and from ``infos``: agent_info and env_info, [B].

    With ``auto_reset``, ``_observation/`` may need memory in addition to ``observation/``.
    """
    finals = tuple(
        n_buffers * _named(layout, "reached/").nbytes() if "restarted" in layout else 0 for layout in layouts
    )
    buffers = tuple(n_buffers * layout.nbytes() - final for layout, final in zip(layouts, finals, strict=True))
    batch = sum(value.nbytes for value in infos.values())
    for layout in layouts:
        T, B = layout["running"].shape
        batch += _named(layout, "stream/", "action/", "state/").nbytes()
        batch += 4 * B * torch.int64.itemsize  # environment, env_seed, step and policy_version in its info
        if auto_reset:  # all but the random keys, which a restart does not change
            frames = {name: spec for name, spec in _named(layout, "stream/").items() if name != "stream/rng"}
            batch += Layout(frames).nbytes() * T // (T + 1)
    return MemoryReport(buffers, finals, batch, weights, _anonymous_bytes(pids))


def _anonymous_bytes(pids: Sequence[int]) -> tuple[int, ...]:
    """Return the bytes of these processes, and of the server that forked them, if any."""
    try:
        servers = {kilobytes(pid, "status")["PPid"] for pid in pids} - {os.getpid()}
        return tuple(1024 * kilobytes(pid, "smaps_rollup")["Pss_Anon"] for pid in (*pids, *servers))
    except (OSError, KeyError):  # a process has ended, or this is not Linux
        return ()


def kilobytes(*place: object) -> dict[str, int]:
    """Read the named numbers in a file of /proc. Sizes are in units of 1,024 bytes."""
    text = Path("/proc", *map(str, place)).read_text()
    return {name: int(number) for name, number in re.findall(r"^(\w+):\s+(\d+)", text, re.MULTILINE)}


def _named(layout: Layout, *prefixes: str) -> Layout:
    return Layout({name: spec for name, spec in layout.items() if name.startswith(prefixes)})
