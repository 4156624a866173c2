"""Shared code of the learning benchmarks: train seed after seed, show each in a table, write them down. Layer 5."""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from operator import itemgetter
from typing import Any

import torch
from common import reporting
from common.reporting import Row

from rlstruct.algos.training.evaluation import TrainingResult
from rlstruct.algos.training.learning_curve import Curve


@dataclass(frozen=True)
class Task:
    """Something to learn."""

    train: Callable[..., TrainingResult]  # takes a seed and further settings of its configuration
    target: float | None  # the mean return of the final evaluation that is asked for; None asks for nothing
    about: str  # one line for the list of tasks
    n_seeds: int = 3  # shown unless others are asked for
    tuned_on: tuple[int, ...] = (0,)  # the seeds that its settings were chosen with
    env: str = ""  # identifier for other libraries

    def seeds(self) -> list[int]:
        """Return seeds that no settings were chosen with."""
        return list(range(200, 200 + self.n_seeds))

    def asked(self) -> str:
        """Return the target in words."""
        return "" if self.target is None else f"{self.target:g}"


def run_task(name: str, task: Task, seeds: Sequence[int], measure: Callable[[int], Row], *, jobs: int = 1) -> None:
    """Train with each seed, print a table of all, and write it as JSON, anew after every seed.

    Seeds that were run before with the same commit stay in the file. ``jobs`` seeds are trained side by side, each in a
    process of one thread. ``measure`` trains with a seed, as `measure` of this module does.
    """
    print(f"{name}: {task.about}; settings chosen with seeds {', '.join(map(str, task.tuned_on)) or 'none'}.\n")
    print(f"| seed | environment steps to {task.asked()} | final return | last five | environment steps | seconds |")
    print("|---:|---:|---:|---:|---:|---:|")
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        for row in pool.map(measure, seeds):
            reached = "never" if row["steps_to_target"] is None else f"{row['steps_to_target']:,}"
            final = f"{row['final_return']:.1f} ± {row['final_std']:.1f} | {last_five(row):.1f}"
            print(f"| {row['seed']} | {reached} | {final} | {row['env_steps']:,} | {row['seconds']:.1f} |", flush=True)
            rows = sorted(
                {one["seed"]: one for one in (*reporting.written(name), row)}.values(), key=itemgetter("seed")
            )
            path = reporting.write(name, rows)
    print(f"\nMachine: {reporting.machine()}\nWritten: {path}")


def run_peer(name: str, task: Task, seeds: Sequence[int], command: Sequence[object], words: Sequence[object]) -> None:
    """Train another library for as many steps, after `run_task`, and write its results next to ours.

    ``command`` ends with the library; environment, seed and steps follow, and then the ``words``. Seeds that are
    written already are not trained again.
    """
    n_steps, ending = reporting.written(name)[0]["env_steps"], f"{name}_{command[-1]}"
    rows = {row["seed"]: row for row in reporting.written(ending)}
    for seed in (seed for seed in seeds if seed not in rows):
        whole = [*map(str, (*command, task.env, seed, n_steps, *words))]
        printed = subprocess.run(whole, check=True, stdout=subprocess.PIPE, text=True).stdout
        rows[seed] = {"seed": seed, **json.loads(printed.splitlines()[-1])}
        print(f"{command[-1]}, seed {seed}: {rows[seed]['final_return']:.1f}", flush=True)
        reporting.write(ending, sorted(rows.values(), key=itemgetter("seed")))


def curves_of(rows: Sequence[Row]) -> list[Curve]:
    """Return the evaluations of each training."""
    return [Curve(*zip(*evaluations_of(row), strict=True)) for row in rows]


def curves_over_minutes(rows: Sequence[Row]) -> list[Curve]:
    """Return the same over the minutes of collecting and learning, of which every step takes an equal part."""
    minutes = [row["learning_seconds"] / 60 / row["env_steps"] for row in rows]
    return [
        Curve([step * each for step in curve.steps], curve.values)
        for curve, each in zip(curves_of(rows), minutes, strict=True)
    ]


def last_five(row: Row) -> float:
    """Return the mean of the last five evaluations of a training: those that it went on after, and the final one."""
    return statistics.fmean(value for _, value in evaluations_of(row)[-5:])


def evaluations_of(row: Row) -> list[tuple[float, float]]:
    """Return (environment steps, mean return) of all evaluations of a training, as a file of results has them."""
    return [(float(step), value) for step, value in row["returns"]]


def learning_seconds(result: TrainingResult) -> float:
    """Return the wall-clock time of collecting and learning: without the evaluations, for which learning waits."""
    return result.seconds - sum(evaluation.seconds for evaluation in result.evaluations[1:-1])


def measure(task: Task, settings: dict[str, Any], seed: int) -> Row:
    """Train with a seed and with other settings than the task's; return the row of a table."""
    torch.set_num_threads(1)
    start = time.perf_counter()
    result = task.train(seed=seed, **settings)
    target = float("inf") if task.target is None else task.target
    reached = [evaluation.env_steps for evaluation in result.evaluations if evaluation.mean_return >= target]
    return {
        "seed": seed, "target": task.target, "steps_to_target": reached[0] if reached else None,
        "final_return": round(result.after.mean_return, 1), "final_std": round(result.after.std_return, 1),
        "final_episodes": len(result.after.returns), "env_steps": result.env_steps,
        "seconds": round(time.perf_counter() - start, 1), "learning_seconds": round(learning_seconds(result), 1),
        "returns": [[evaluation.env_steps, round(evaluation.mean_return, 1)] for evaluation in result.evaluations],
    }  # fmt: skip
