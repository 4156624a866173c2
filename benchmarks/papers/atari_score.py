"""Seconds to a score in Pong and Breakout, after CuLE: A2C with its window, with plain batches, with games on the CPU.

``atari_score``: a window of 20 batches and V-trace takes a gradient step after every step of the games; plain batches
of 5 steps one after five; and as many games as a CPU engine is best with, with plain batches.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from common.reporting import Panels, Row, table
from papers.atari import OURS, create_agent, create_env

from rlstruct import sims
from rlstruct.agents import ConvolutionalActorCritic
from rlstruct.algos import a2c
from rlstruct.algos.training.callbacks import Callback, TrainingContext
from rlstruct.algos.training.presets import PRESETS

if TYPE_CHECKING:
    import torch
    from common.resumable_run import Ladder

Sizes = Mapping[str, Sequence[Any]]
WINDOW, PLAIN, ON_CPU = "window of 20", "plain batches", "games on the CPU, plain batches"
TARGETS = {"Pong": 18.0, "Breakout": 31.8}
"""CuLE's for Pong. It names none for Breakout: here the human player's of Mnih et al. (2015)."""
PAPERS = {"Pong": ("CuLE in Pong: 18", 18.0), "Breakout": ("human player in Breakout: 31.8", 31.8)}
PLAINLY = {"n_timesteps": 5, "n_minibatches": 1, "window": None, "vtrace": False, "trace_decay": 1.0}


class Curve(Callback):
    """Points of a training: frames, seconds of learning, mean return.

    It ends in time for an evaluation that may be due and the last one, each as long as the longest so far.
    After each evaluation it passes what there is of the training's row to ``keep``.
    """

    def __init__(self, deadline: float, keep: Callable[[Row], None]) -> None:
        self.points: list[tuple[int, float, float]] = []
        self._keep = keep
        self._deadline, self._begun, self._evaluating, self._longest = deadline, 0.0, 0.0, 0.0

    def on_start(self, context: TrainingContext) -> None:
        self._begun = time.perf_counter()

    def on_update(self, context: TrainingContext) -> None:
        if time.perf_counter() > self._deadline - 2 * self._longest:
            context.stop("the time budget is used up")

    def on_evaluation(self, context: TrainingContext) -> None:
        last = context.evaluations[-1]
        self._evaluating += last.seconds
        self._longest = max(self._longest, last.seconds)
        seconds = time.perf_counter() - self._begun - self._evaluating
        self.points.append((4 * last.env_steps, max(0.0, seconds), last.mean_return))
        found = {"steps": context.env_steps, "updates": context.updates, "stopped": None}
        self._keep({"N": context.config.n_envs, "curve": self.points, "seconds": seconds, **found})


def train(game: str, way: str, device: torch.device, sizes: Sizes, seconds: float, keep: Callable[[Row], None]) -> Row:
    """Train once with the settings of `rlstruct train`, and return the curve.

    Games last for ``limit`` steps at most, and an evaluation waits for their end: short ones are for small trainings.
    """
    names = ("steps", "n_envs", "on_cpu", "limit", "evaluations", "episodes")
    steps, n_envs, on_cpu, limit, evaluations, episodes = (sizes[name][0] for name in names)
    settings: dict[str, Any] = {"n_env_steps": steps, "n_envs": n_envs, "evaluation_interval": steps // evaluations}
    settings |= dict.fromkeys(("learner_device", "batcher_device", "evaluation_device"), str(device))
    settings |= {"target_return": TARGETS[game], "evaluation_episodes": episodes}
    settings |= {"evaluation_timesteps": min(limit or 100, 100), "seed": 200}
    if way != WINDOW:
        settings |= PLAINLY
    if way == ON_CPU:
        settings |= {"n_envs": on_cpu, "initial_steps": 0}
    config = replace(PRESETS["a2c", f"ALE/{game}-v5"].config, **settings)
    n_actions = int(sims.make(f"ALE/{game}-v5", 1).action_space.n)
    create_model = partial(ConvolutionalActorCritic, (4, 84, 84), n_actions)
    engine = "AtariVectorEnv" if way == ON_CPU else OURS
    curve = Curve(time.perf_counter() + seconds, keep)
    result = a2c.train(config, create_model, create_agent, partial(create_env, engine, game, device=str(device),
                       limit=limit), callbacks=[curve])  # fmt: skip
    return {"N": config.n_envs, "curve": curve.points, "steps": result.env_steps, "seconds": result.seconds,
            "updates": len(result.losses.get("loss", ())), "stopped": result.stopped}  # fmt: skip


def measure_score(run: Ladder, sizes: Sizes) -> None:
    """Train in each game in each way, with games on the CPU for twice as long; what has not that much time waits."""
    for game, way in itertools.product(sizes["game"], (WINDOW, PLAIN, ON_CPU)):
        row: Row = {"part": "atari_score", "game": game, "way": way}
        if run.measured(**row):
            continue
        seconds = sizes["seconds"][0] * (2 if way == ON_CPU else 1)
        if not run.left(seconds, "atari_score"):
            continue
        with run.caught(**row), run.noted(**row):
            run.add(**row, **train(game, way, run.device, sizes, seconds, partial(run.add_unfinished, row)))


def score_table(rows: Sequence[Row]) -> list[str]:
    """Tabulate learning time, speed, updates and returns of each training, and when it reached the target."""
    body = []
    for row in (row for row in rows if len(row.get("curve", ())) > 1):
        target = TARGETS[row["game"]]
        reached = [point for point in row["curve"] if point[2] >= target]
        when = f"{reached[0][0]:,} frames, {reached[0][1]:.0f} s" if reached else "no"
        (_, _, first), (frames, seconds, last) = row["curve"][0], row["curve"][-1]
        rates = [f"{frames / seconds:,.0f}", f"{row['updates'] / seconds:.1f}"]
        body.append([row["game"], row["way"], row["N"], f"{frames:,}", f"{seconds:.0f}", *rates,
                     f"{first:.1f} to {last:.1f}", f"{target:g}: {when}"])  # fmt: skip
    head = "game | A2C with | games | frames | seconds of learning | frames/s | updates/s | return | target reached"
    return table(head, body, 2)


def score_lines(rows: Sequence[Row]) -> Panels:
    """Return the mean return over seconds of learning: a panel for each game, a line for each way, and the target."""
    panels = Panels("seconds of learning", "mean return", log=False)
    for row in rows:
        for _, seconds, mean_return in row.get("curve", ()):
            panels.add(row["game"], row["way"], seconds, mean_return)
    for game in panels:
        panels.add_paper(game, *PAPERS[game])
    return panels
