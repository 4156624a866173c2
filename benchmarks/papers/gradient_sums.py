"""Sums of gradients by learners that share several GPUs, after GMI-DRL: flat, or within each GPU and then across.

``sums``: the flat sum takes all learners through the CPU by gloo, since NCCL refuses two learners on one GPU; the other
one uses each GPU's memory, and then NCCL. On a CPU, processes that share memory stand for those of one GPU, and gloo
for NCCL.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from common.ladder_rungs import synchronize
from common.reporting import Bars, Row, table

from rlstruct.agents import ActorCritic
from rlstruct.algos.distributed.gpu_all_reduce import GpuAllReduce
from rlstruct.sharing import Role, launch_roles

if TYPE_CHECKING:
    from common.resumable_run import Ladder

FLAT, NESTED = "flat", "within GPUs, then across"
ROUNDS = 9
NETWORKS: dict[str, tuple[int, int, tuple[int, ...]]] = {
    "Cartpole": (4, 1, (32, 32)), "Ant": (60, 8, (256, 128, 64)), "Humanoid": (108, 21, (256, 128, 64)),
    "ShadowHand": (211, 20, (256, 128, 64)),
}  # fmt: skip
"""Observations, actions and hidden layers of the paper's tasks."""
PAPERS = {"Ant": 320_925 / 319_699, "Humanoid": 425_641 / 415_280}
"""Steps per second of a training on two GPUs of three processes each, with the second way over the first one."""


def n_weights(network: str) -> int:
    n_inputs, n_actions, hidden = NETWORKS[network]
    return sum(weight.numel() for weight in ActorCritic(n_inputs, n_actions, hidden=hidden).parameters())


@dataclass
class Learner(Role):
    """Sums gradients of every size in both ways, in turns, and returns the seconds of a sum in each round."""

    n_gpus: int
    on: str  # "cuda" or "cpu"
    sizes: Sequence[int]
    n_calls: int

    def run(self) -> list[dict[str, list[float]]]:
        device = torch.device(f"cuda:{self.index % self.n_gpus}" if self.on == "cuda" else "cpu")
        group = self._messages.group
        groups = [[*range(gpu, self.size(), self.n_gpus)] for gpu in range(self.n_gpus)]
        nested = GpuAllReduce(self.index, groups, group.store, group.poll, "nccl" if self.on == "cuda" else "gloo")

        def flat(x: torch.Tensor) -> torch.Tensor:
            return self.all_reduce(x.to("cpu")).to(x.device)

        ways: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {FLAT: flat, NESTED: nested.all_reduce_sum}
        found = []
        for size in self.sizes:
            x = torch.randn(size, generator=torch.Generator().manual_seed(self.index)).to(device)
            first, second = (add(x) for add in ways.values())  # the second makes room in the GPU
            torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-5)
            seconds: dict[str, list[float]] = {way: [] for way in ways}
            for _, way in itertools.product(range(ROUNDS), ways):
                begin = time.perf_counter()
                for _ in range(self.n_calls):
                    ways[way](x)
                synchronize(device)
                seconds[way].append((time.perf_counter() - begin) / self.n_calls)
            found.append(seconds)
        return found


def measure_sums(run: Ladder, sizes: Mapping[str, Sequence[int]]) -> None:
    """Time both ways in turns, with every number of GPUs that there is and of processes on each."""
    there = torch.cuda.device_count() if run.device.type == "cuda" else max(sizes["GPUs"])
    numbers = ({"GPUs": n, "m": m} for n, m in itertools.product(sizes["GPUs"], sizes["m"]) if n <= there)
    for where in run.todo("sums", 30, numbers):
        row: Row = {"part": "sums", **where}
        with run.caught(**row), run.limited(**row):
            counts = [n_weights(network) for network in NETWORKS]
            learners = [
                Learner(where["GPUs"], run.device.type, counts, sizes["calls"][0])
                for _ in range(where["GPUs"] * where["m"])
            ]
            found = launch_roles({"learner": learners})["learner"][0]
            for network, count, seconds in zip(NETWORKS, counts, found, strict=True):
                for way, rounds in seconds.items():
                    sums = {"ms": 1e3 * statistics.median(rounds), "rounds": rounds}
                    run.add(**row, network=network, weights=count, way=way, **sums)


def sums_table(rows: Sequence[Row]) -> list[str]:
    """Tabulate the milliseconds of a sum in both ways, by number of processes and network."""
    lines = []
    for row, ratio in flat_over_nested(rows):
        paper = PAPERS.get(row["network"], 0.0) if (row["GPUs"], row["m"]) == (2, 3) else 0.0
        lines.append([
            f"{row['GPUs']} x {row['m']}", row["network"], f"{row['weights']:,}", f"{ratio * row['ms']:.2f}",
            f"{row['ms']:.2f}", f"{ratio:.2f}", f"{paper:.3f}" if paper else "",
        ])  # fmt: skip
    head = f"GPUs x processes | network | weights | {FLAT}, ms | {NESTED}, ms | ratio | GMI-DRL's training"
    return table(head, lines, 2)


def flat_over_nested(rows: Sequence[Row]) -> list[tuple[Row, float]]:
    """Return the rows of the second way, each with the first one's time over its own."""
    ms = {(row["GPUs"], row["m"], row["network"], row["way"]): row["ms"] for row in rows if "ms" in row}
    nested = [row for row in rows if row.get("way") == NESTED]
    return [(row, ms[row["GPUs"], row["m"], row["network"], FLAT] / row["ms"]) for row in nested]


def sums_bars(rows: Sequence[Row]) -> Bars:
    """Return how much faster the second way is, and how much faster GMI-DRL's whole training gets by it."""
    drawn, title = Bars(), f"time of a sum: {FLAT}, over {NESTED}"
    for row, ratio in flat_over_nested(rows):
        drawn.add(title, f"{row['GPUs']} GPUs x {row['m']} processes, {row['network']}", "", ratio)
    if drawn:
        drawn.add_paper(title, f"GMI-DRL, the whole training: {PAPERS['Humanoid']:.3f}", round(PAPERS["Humanoid"], 3))
    return drawn
