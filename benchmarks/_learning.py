"""What benchmarks of learning share: train seed after seed, show every one in a table, write them down. Layer 5."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import _report
import torch

from rlstruct.algos.training import TrainingResult

Row = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """Something to learn.

    Attributes:
        train: trains with a seed and further settings of its configuration.
        target: the mean return of the final evaluation that is asked for.
        about: one line for the list of tasks.
        n_seeds: how many seeds are shown unless others are asked for.
        tuned_on: the seeds that its settings were chosen with.
    """

    train: Callable[..., TrainingResult]
    target: float
    about: str
    n_seeds: int = 3
    tuned_on: tuple[int, ...] = (0,)


def run_task(name: str, task: Task, seeds: Sequence[int], settings: dict[str, Any], jobs: int = 1) -> None:
    """Train with each seed, print a table of all, and write it as JSON and as a picture.

    Seeds that were run before with the same commit stay in the file and in the picture.

    Args:
        name: of the task.
        task: see `Task`.
        seeds: which ones; all of them are shown.
        settings: of the configuration, in place of the task's own.
        jobs: how many seeds are trained side by side, each in a process of one thread.
    """
    print(f"{name}: {task.about}; settings chosen with seeds {', '.join(map(str, task.tuned_on))}.\n")
    print(f"| seed | environment steps to {task.target:g} | final return | environment steps | seconds |")
    print("|---:|---:|---:|---:|---:|")
    rows = []
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        for row in pool.map(partial(_measure, task, settings), seeds):
            rows.append(row)
            reached = "never" if row["steps_to_target"] is None else f"{row['steps_to_target']:,}"
            final = f"{row['final_return']:.1f} ± {row['final_std']:.1f}"
            print(f"| {row['seed']} | {reached} | {final} | {row['env_steps']:,} | {row['seconds']:.1f} |", flush=True)
    good = sum(row["final_return"] >= task.target for row in rows)
    print(f"\n{good} of {len(rows)} seeds end at {task.target:g} or more. Machine: {_report.machine()}")
    rows = sorted([*_other_rows(name, seeds), *rows], key=lambda row: int(row["seed"]))
    path = _report.write(name, rows)
    draw(name, rows, task.target, path.with_suffix(".png"))
    print(f"Written: {path} and the picture beside it.")


def draw(name: str, rows: Sequence[Row], target: float, path: Path) -> None:
    """Draw the evaluations of all seeds into a PNG file.

    Args:
        name: stands above the picture.
        rows: as `run_task` writes them.
        target: a line at this return.
        path: of the file to write.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(6.0, 3.6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for row in rows:
        steps, returns = zip(*evaluations_of(row), strict=True)
        axes.plot(steps, returns, linewidth=1.4, label=f"seed {row['seed']}")
    axes.axhline(target, color="#9aa5b1", linestyle="--", linewidth=1)
    axes.set_title(name, loc="left", fontsize=11)
    axes.set_xlabel("environment steps collected")
    axes.set_ylabel("mean return of an evaluation")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, ncols=2 if len(rows) > 5 else 1)
    figure.savefig(path)


def evaluations_of(row: Row) -> list[tuple[float, float]]:
    """Return (environment steps, mean return) of all evaluations of a training, as a file of results has them."""
    returns = row["returns"]
    # Files of before have one for each step: there the final evaluation replaced the one that reached the target.
    pairs = returns.items() if isinstance(returns, dict) else returns
    return [(float(step), value) for step, value in pairs]


def learning_seconds(result: TrainingResult) -> float:
    """Return the wall-clock time of collecting and learning: without the evaluations, for which learning waits."""
    return result.seconds - sum(evaluation.seconds for evaluation in result.evaluations[1:-1])


def _other_rows(name: str, seeds: Sequence[int]) -> list[Row]:
    """Return what the file of this commit says about other seeds."""
    path = _report.result_path(name)
    rows: list[Row] = json.loads(path.read_text())["rows"] if path.exists() else []
    return [row for row in rows if row["seed"] not in seeds]


def _measure(task: Task, settings: dict[str, Any], seed: int) -> Row:
    torch.set_num_threads(1)
    start = time.perf_counter()
    result = task.train(seed=seed, **settings)
    reached = [evaluation.env_steps for evaluation in result.evaluations if evaluation.mean_return >= task.target]
    return {
        "seed": seed,
        "target": task.target,
        "steps_to_target": reached[0] if reached else None,
        "final_return": round(result.after.mean_return, 1),
        "final_std": round(result.after.std_return, 1),
        "final_episodes": len(result.after.returns),
        "env_steps": result.env_steps,
        "seconds": round(time.perf_counter() - start, 1),
        "learning_seconds": round(learning_seconds(result), 1),
        "returns": [[evaluation.env_steps, round(evaluation.mean_return, 1)] for evaluation in result.evaluations],
    }
