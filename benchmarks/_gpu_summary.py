"""Summary of the rows of benchmarks/gpu.py: ratios and their targets, and a figure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import _report
from _gpu_trained import WAYS

if TYPE_CHECKING:
    from gpu import Run


def summary(run: Run) -> None:
    """Compute ratios, and compare them with their targets."""
    run.rows = [row for row in run.rows if row["part"] != "summary"]
    small = {n for n in (64, 256, 1024, 4096) if run.best("simulation", "torch eager", N=n)}
    graph = [
        _report.ratio(run.best("simulation", "CUDA graph", N=n), run.best("simulation", "torch eager", N=n))
        for n in small
    ]
    vectorised = max(run.best("simulation", name) or 0.0 for name in ("torch eager", "CUDA graph"))
    deciding = max(
        (row["steps_per_second"] for row in run.rows if row["part"] == "policy" and "steps_per_second" in row),
        default=None,
    )
    rows = {
        "graph over eager, N <= 4096": (min((g for g in graph if g), default=None), 4.0),
        "policy as one kernel over one graph, N = 4096": (
            _report.ratio(run.best("policy", "Warp fused policy", N=4096),
                   run.best("policy", "torch, batcher's CUDA graph", N=4096)), 1.1),
        "vectorised (best N) over SyncVectorEnv (best N)": (
            _report.ratio(vectorised or None, run.best("simulation", "SyncVectorEnv")), 1000.0),
        "policy in the loop, steps per second": (deciding, 1e8),
        "trained steps per second, 4,096 environments": (_trained(run, 4096), 1e6),
        "trained steps per second, 65,536 or more": (_trained(run, 1 << 16, 1 << 18), 1e7),
    }  # fmt: skip
    for name, (value, target) in rows.items():
        met = "not measured" if value is None else value >= target
        run.add(part="summary", ratio=name, value=value, target=target, met=met)
    sync = [row for row in run.rows if row.get("part") == "sync" and "graph" in row]
    waits = [row.get("sync_debug_mode", row.get("left_out")) for row in sync]
    clean = "not measured" if len(waits) < 2 else waits == ["clean", "clean"]
    run.add(
        part="summary", ratio="sync_debug_mode('error') through execute()", value=str(waits), target="clean", met=clean
    )


def draw(run: Run) -> None:
    """Draw rates over N, one panel for each part."""
    if (plt := _report.pyplot()) is None:
        return
    figure, panels = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
    for axes, part in zip(panels, ("simulation", "policy"), strict=True):
        rows = [row for row in run.rows if row.get("part") == part and "steps_per_second" in row]
        for name in dict.fromkeys(row["rung"] for row in rows):
            points = [(row["N"], row["steps_per_second"]) for row in rows if row["rung"] == name]
            axes.loglog(*zip(*points, strict=True), marker="o", markersize=3, label=name)
        axes.set_title({"simulation": "CartPole alone", "policy": "with a 64-64 policy in the loop"}[part])
        axes.set_xlabel(f"environments, {_report.machine()['device']}")
        if rows:
            axes.legend(fontsize=7)
    panels[0].set_ylabel("environment steps per second")
    figure.tight_layout()
    figure.savefig(run.path.with_suffix(".png"), dpi=120)
    plt.close(figure)


def _trained(run: Run, *sizes: int) -> float | None:
    """Return the highest rate of PPO at these numbers of environments."""
    return max(run.best("trained", way, N=n) or 0.0 for way in WAYS for n in sizes) or None
