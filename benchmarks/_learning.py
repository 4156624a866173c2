"""What benchmarks of learning share: train seed after seed, show every one in a table, write them down. Layer 5."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import _report
import torch

from rlstruct.algos.training import TrainingResult


def run_seeds(name: str, train_seed: Callable[[int], TrainingResult], seeds: Sequence[int], target: float) -> None:
    """Train with each seed, print a table of all, and write it as JSON.

    Args:
        name: of the benchmark.
        train_seed: trains with one seed.
        seeds: which ones; all of them are shown.
        target: the mean return of an evaluation that counts as solved.
    """
    torch.set_num_threads(1)
    print(f"| seed | environment steps to {target:g} | final return | environment steps | seconds |")
    print("|---:|---:|---:|---:|---:|")
    rows = []
    for seed in seeds:
        start = time.perf_counter()
        rows.append(row := _row(seed, train_seed(seed), target, time.perf_counter() - start))
        reached = "never" if row["steps_to_target"] is None else f"{row['steps_to_target']:,}"
        final = f"{row['final_return']:.1f} ± {row['final_std']:.1f}"
        print(f"| {seed} | {reached} | {final} | {row['env_steps']:,} | {row['seconds']:.1f} |", flush=True)
    good = sum(row["final_return"] >= target for row in rows)
    print(f"\n{good} of {len(rows)} seeds end at {target:g} or more. Machine: {_report.machine()}")
    print(f"Written: {_report.write(name, rows)}")


def _row(seed: int, result: TrainingResult, target: float, seconds: float) -> dict[str, Any]:
    reached = [evaluation.env_steps for evaluation in result.evaluations if evaluation.mean_return >= target]
    return {
        "seed": seed,
        "target": target,
        "steps_to_target": reached[0] if reached else None,
        "final_return": round(result.after.mean_return, 1),
        "final_std": round(result.after.std_return, 1),
        "final_episodes": len(result.after.returns),
        "env_steps": result.env_steps,
        "seconds": round(seconds, 1),
        "returns": {evaluation.env_steps: round(evaluation.mean_return, 1) for evaluation in result.evaluations},
    }
