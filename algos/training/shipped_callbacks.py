"""Callbacks that are ready to use, each short enough to copy and change."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from rlstruct.algos.seeds import seed_range
from rlstruct.algos.training.callbacks import Callback, TrainingContext
from rlstruct.errors import BadTypeError, BadValueError, import_extra
from rlstruct.options import writable

GIF_FPS = 50  # a gif shows no more frames per second, see `frame_times`
DEFAULT_FPS = 30  # of an environment that declares no render_fps, as in gymnasium's RecordVideo


class EarlyStopping(Callback):
    """Stops a training whose evaluations no longer improve.

    Args:
        patience: number of evaluations in a row without an improvement after which the training stops.
        min_improvement: smallest increase of the mean return that counts as an improvement.
    """

    kept = "best", "n_worse"

    def __init__(self, patience: int, *, min_improvement: float = 0.0) -> None:
        if patience < 1:
            raise BadValueError(f"EarlyStopping: patience is {patience}, expected at least 1.")
        self.patience, self.min_improvement = patience, min_improvement
        self.best, self.n_worse = -math.inf, 0

    def on_evaluation(self, context: TrainingContext) -> None:
        """Count the evaluations since the last improvement."""
        mean_return = context.evaluations[-1].mean_return
        if mean_return > self.best + self.min_improvement:
            self.best, self.n_worse = mean_return, 0
            return
        self.n_worse += 1
        if self.n_worse >= self.patience:
            context.stop(f"EarlyStopping: {self.n_worse} evaluations without improvement, the best was {self.best:g}")


class BestCheckpoint(Callback):
    """Keeps the policy of the best evaluation in a file, which `rlstruct.load` reads.

    The untrained network is not kept.

    Args:
        file: path of the file; None for ``best.pt`` in the run folder.
    """

    kept = ("best",)

    def __init__(self, file: str | Path | None = None) -> None:
        self.file = file
        self.best = -math.inf

    def on_start(self, context: TrainingContext) -> None:
        """Create the folder of the file; raise if there is no place for it."""
        writable("BestCheckpoint", _place("BestCheckpoint", self.file, context, "best.pt"), replaces=True)

    def on_evaluation(self, context: TrainingContext) -> None:
        """Save the policy if this evaluation is the best so far."""
        result = context.evaluations[-1]
        if result.env_steps and result.mean_return > self.best:
            self.best = result.mean_return
            context.save_policy(_place("BestCheckpoint", self.file, context, "best.pt"))


class OptunaPruning(Callback):
    """Reports every evaluation to an Optuna trial, and ends the trial if its pruner decides to.

    The mean return is reported as it is if the study maximises, and with the opposite sign if it minimises, so in both
    a trial with higher returns counts as better.

    Args:
        trial: an ``optuna.Trial``.

    Raises:
        ImportError: the extra ``optuna`` is not installed.
        ValueError: the study has several objectives, for which Optuna cannot prune.
    """

    def __init__(self, trial: Any) -> None:  # noqa: ANN401 - optuna is optional
        self._optuna = import_extra("optuna", "optuna", "OptunaPruning")
        self.trial, self._reported = trial, 0
        directions = [one.name for one in getattr(getattr(trial, "study", None), "directions", ())]
        if len(directions) > 1:
            raise BadValueError(
                f"OptunaPruning: the study has {len(directions)} objectives, expected 1: Optuna prunes no others. "
                "Leave this callback out."
            )
        self._sign = -1.0 if directions == ["MINIMIZE"] else 1.0

    def on_evaluation(self, context: TrainingContext) -> None:
        """Report the mean return; raise ``optuna.TrialPruned``, which Optuna expects, if the trial is pruned."""
        result = context.evaluations[-1]
        if result.env_steps <= self._reported:  # the untrained network, or the same weights again
            return
        self._reported = result.env_steps
        self.trial.report(self._sign * result.mean_return, result.env_steps)
        if context.env_steps < context.config.n_env_steps and self.trial.should_prune():
            raise self._optuna.TrialPruned(f"mean return {result.mean_return:g} after {result.env_steps} steps")


class PeriodicVideo(Callback):
    """Records an episode after every few evaluations, as ``videos/STEPS.gif`` in the run folder, at its render_fps.

    Args:
        create_env: returns one gymnasium environment with ``render_mode="rgb_array"``, wrapped as in the training.
        every: number of evaluations between two videos.
        longest: maximum number of steps in a video.
        folder: folder of the videos; None for the run folder.
    """

    kept = ("n_evaluations",)

    def __init__(
        self,
        create_env: Callable[[], gymnasium.Env[Any, Any]],
        *,
        every: int = 1,
        longest: int = 1_000,
        folder: str | Path | None = None,
    ) -> None:
        self._image = import_extra("PIL.Image", "train", "PeriodicVideo")
        if every < 1:
            raise BadValueError(f"PeriodicVideo: every is {every}, expected at least 1.")
        self.create_env, self.every, self.longest, self.folder = create_env, every, longest, folder
        self.n_evaluations = 0

    def on_start(self, context: TrainingContext) -> None:
        """Create the folder of the videos; raise if there is no place for it, or the environment cannot be drawn."""
        writable("PeriodicVideo", _place("PeriodicVideo", self.folder, context, "videos"), folder=True)
        env = self.create_env()
        try:
            env.reset(seed=seed_range("film", context.config.seed)[0])
            frame = env.render()
        finally:
            env.close()
        if not isinstance(frame, np.ndarray):
            raise BadTypeError(
                f"PeriodicVideo: render returned {type(frame).__name__}, expected an array of bytes [height, width, "
                '3]. Make the environment with render_mode="rgb_array".'
            )

    def on_evaluation(self, context: TrainingContext) -> None:
        """Play and render an episode with the evaluated policy; the training waits."""
        self.n_evaluations += 1
        if not context.evaluations[-1].env_steps or self.n_evaluations % self.every:
            return
        folder = _place("PeriodicVideo", self.folder, context, "videos")
        policy, env = context.policy(), self.create_env()
        fps = env.metadata.get("render_fps") or DEFAULT_FPS
        try:
            seeds = seed_range("film", context.config.seed)
            observation, _ = env.reset(seed=seeds[self.n_evaluations % len(seeds)])
            frames, over = [env.render()], False
            while not over and len(frames) < self.longest:
                observation, _, terminated, truncated, _ = env.step(policy.act(observation))
                frames.append(env.render())
                over = terminated or truncated
        finally:
            env.close()
        first, *others = [self._image.fromarray(frame) for frame in frames]
        file = folder / f"{context.evaluations[-1].env_steps:010d}.gif"
        first.save(file, save_all=True, append_images=others, duration=frame_times(len(frames), fps), loop=0)


def frame_times(n: int, fps: float) -> list[int]:
    """Return the milliseconds for which a gif shows each of ``n`` frames, rounded so that their sum is right.

    A gif counts in hundredths of a second, and browsers show frames of less than 20 ms for 100 ms.

    >>> frame_times(3, 30), frame_times(2, 125)
    ([30, 40, 30], [20, 20])
    """
    ends = [round(100 * i / min(fps, GIF_FPS)) for i in range(n + 1)]
    return [10 * (end - begin) for begin, end in itertools.pairwise(ends)]


def _place(who: str, path: str | Path | None, context: TrainingContext, name: str) -> Path:
    """Return the given path, or one in the run folder."""
    if path is not None:
        return Path(path)
    if context.run is None:
        raise BadValueError(f"{who}: there is no run folder. Train with run=RunFolder(…), or pass a path.")
    return context.run.path / name
