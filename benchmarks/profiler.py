"""Is the profiler right? About ten minutes on two cores. Layer 6.

    python benchmarks/profiler.py [--algorithms dqn] [--seconds 60]

REINFORCE, A2C, DQN and PPO on CartPole, in one process and two. What a step takes in profiled stretches, corrected, is
divided by what it takes in the others; the ratio should be 1. Every row is written as
it comes. `experiments.py --parts survey` says what the profiler finds.

Equal trainings differ by a tenth to a half on a virtual machine: other programs, and where in memory things lie. So
profiled and plain stretches take turns within one training, in all of its processes, in the order plain, profiled,
profiled, plain: what is compared lies a second apart, in the same processes with the same memory. In a plain stretch
there is no profiler: all processes have left the profile, as after the end of `rlstruct.profiling.profile`.

Nothing changes while it trains: learning rates are 0, so that policies stay random and episodes alike. Of several
processes each keeps to its own core. Nothing else is done to reduce noise; both kinds of stretch would get it alike.
How much neighbouring plain stretches differ from each other says how far to trust it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import mmap
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import tables
import torch
from common.reporting import interval, machine, write
from numpy.typing import NDArray

from rlstruct.algos import ALGORITHMS, Callback, TrainingContext
from rlstruct.cli.agents import prepare
from rlstruct.cli.tasks import Task
from rlstruct.core import DictTensor
from rlstruct.envs import GymEnv, GymEnvInf
from rlstruct.profiling.breakdown import break_down
from rlstruct.profiling.events import load_recordings
from rlstruct.profiling.operations import VARIABLE, start_if_requested, stop
from rlstruct.profiling.overhead import prices_of
from rlstruct.profiling.settings import settings

Numbers = NDArray[np.float64]

STRETCH = 0.25  # seconds with or without a profile in turn
SETTLE = 0.05  # seconds before each stretch, in which the caches forget how the last one ended
TRAINED = "reinforce", "a2c", "dqn", "ppo"
PLAIN, PROFILED = 0, 1
WINDOW, FOLLOWED, TOOK, STEPS = range(4)  # words of a board: the open window, which one the worker has joined, …


class Board:
    """Words of 64 bits that the processes of a training share: what is profiled now, and how much was done."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with (folder / "board").open("r+b") as file:
            self.words = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")

    def begin(self, window: int) -> None:
        os.environ[VARIABLE] = (self.folder / f"{window}.json").read_text()
        start_if_requested()

    def end(self) -> None:
        stop()
        os.environ.pop(VARIABLE, None)


class _Watched:
    """Environments that count their steps; those of a worker join the window that their parent has opened."""

    def __init__(self, n_envs: int, seed: int, board: Path) -> None:
        super().__init__([gymnasium.make("CartPole-v1") for _ in range(n_envs)], seed)  # type: ignore[call-arg]
        self._board, self._window = Board(board), 0
        self._follows = multiprocessing.parent_process() is not None

    def step(self, action: DictTensor) -> Any:  # noqa: ANN401 - as GymEnv says
        """Look whether it is time to record, or no longer."""
        words = self._board.words
        words[STEPS] += 1
        if self._follows and words[WINDOW] != self._window:
            self._window, begun = words[WINDOW], time.perf_counter_ns()
            if self._window:
                self._board.begin(self._window)
            else:
                self._board.end()
            words[TOOK], words[FOLLOWED] = time.perf_counter_ns() - begun, self._window
        return super().step(action)  # type: ignore[misc]


class Restarting(_Watched, GymEnvInf):
    """For all algorithms but REINFORCE."""


class Episodic(_Watched, GymEnv):
    """Stand still at the end of an episode."""


class Stretches(Callback):
    """Opens and closes windows between the iterations of a training, and ends it."""

    def __init__(self, board: Board, total: float) -> None:
        self._board, self._total = board, total
        self._script: Iterator[bool] | None = None
        self._has_workers = False
        self.found: list[tuple[int, list[float]]] = []  # number of the window, 0 for none; seconds and steps

    def on_update(self, context: TrainingContext) -> None:
        if self._script is None:  # all processes have started
            pids = [os.getpid(), *(child.pid for child in multiprocessing.active_children() if child.pid)]
            for pid, core in zip(pids, sorted(os.sched_getaffinity(0), reverse=True), strict=False):
                os.sched_setaffinity(pid, {core})
            self._has_workers = len(pids) > 1
            self._script = self._all()
        if not next(self._script, False):
            context.stop("all stretches are over")

    def _all(self) -> Iterator[bool]:
        end = time.perf_counter() + self._total
        yield from self._one(1)
        self.found.pop()  # torch prepares itself at its first profile
        for cycle in itertools.count():
            for place, kind in enumerate((PLAIN, PROFILED, PROFILED, PLAIN)):
                yield from self._one(kind * (2 + 4 * cycle + place))
            if time.perf_counter() > end:
                return

    def _one(self, window: int) -> Iterator[bool]:
        words = self._board.words
        settled = time.perf_counter() + SETTLE
        while time.perf_counter() < settled or words[FOLLOWED]:
            yield True
        words[TOOK] = 0
        if window:
            said = settings(self._board.folder / str(window), window=3600.0)
            (self._board.folder / f"{window}.json").write_text(said.replace('"start"', '"training"'))
            self._board.begin(window)
            words[WINDOW] = window
        begun = self._read()
        while time.perf_counter() - begun[0] < STRETCH:
            yield True
        seconds, steps = self._read() - begun
        self.found.append((window, [seconds - 1e-9 * words[TOOK], steps]))
        if window:
            words[WINDOW] = 0
            words[FOLLOWED] |= self._has_workers
            self._board.end()

    def _read(self) -> Numbers:
        return np.asarray([time.perf_counter(), self._board.words[STEPS]])


Train = Callable[[Stretches, Path], object]


def compare(train: Train, seconds: float) -> dict[str, Any]:
    """Train with profiled and plain stretches in turn; ``train`` gets a callback, and the folder of the board.

    A row has, with 95 % intervals: how much more a step takes in profiled stretches, corrected (``bias``) and as
    measured (``uncorrected_bias``), as a share of what it takes in plain ones; and how much neighbouring plain
    stretches differ (``noise``).
    """
    cores = os.sched_getaffinity(0)
    folder = Path(tempfile.mkdtemp())
    (folder / "board").write_bytes(bytes(8 * 4))
    try:
        stretches = Stretches(Board(folder), seconds)
        try:
            train(stretches, folder)
        finally:
            os.sched_setaffinity(0, cores)
        paid = payments(folder, [window for window, _ in stretches.found if window])
    finally:
        shutil.rmtree(folder)
    each = np.asarray([numbers for _, numbers in stretches.found])
    paid_in = np.asarray([paid.get(window, 0.0) for window, _ in stretches.found])
    cycles = np.log(each[:, 0] / each[:, 1]).reshape(-1, 4)
    kept = np.log1p(-paid_in / each[:, 0]).reshape(-1, 4)[:, 1:3].mean(1)
    bias = cycles[:, 1:3].mean(1) - cycles[:, ::3].mean(1)
    noise = np.asarray([b[0] - a[3] for a, b in itertools.pairwise(cycles)])
    row: dict[str, Any] = {"cycles": len(cycles)}
    for name, values in {"bias": bias + kept, "uncorrected_bias": bias, "noise": noise}.items():
        row[f"{name}_wall"] = float(np.expm1(np.median(values)))
        row[f"{name}_wall_interval"] = np.expm1(interval(values)).tolist()
    return row


def payments(folder: Path, windows: Sequence[int]) -> dict[int, float]:
    """Return the seconds that a correction takes away, by window."""
    recordings = {window: load_recordings(folder / str(window)) for window in windows}
    prices = prices_of([one for found in recordings.values() for one in found])
    first = {window: break_down(found, prices)[0] for window, found in recordings.items()}
    return {window: process.seconds - process.corrected for window, process in first.items()}


def train(name: str, n_processes: int, stretches: Stretches, board: Path) -> None:
    """Train on CartPole from a fixed seed, without learning, until the stretches are over."""
    algorithm, (_, choice) = ALGORITHMS[name], prepare(name, Task(env="CartPole-v1"))
    learner = algorithm.learner
    config = learner.settings(
        n_env_steps=10**12, n_envs=8, n_processes=n_processes, learning_rate=0.0, evaluation_processes=0,
        evaluation_episodes=1, evaluation_step_limit=10_000, evaluation_interval=10**9,
        **({"learning_starts": 200} if name == "dqn" else {}),
    )  # fmt: skip
    create_env = Episodic if learner.whole_episodes else Restarting
    algorithm(config, choice.create_model, choice.create_agent, create_env, env_args={"board": board},
              callbacks=[stretches])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", choices=TRAINED, default=TRAINED)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each of the eight kinds of training")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(machine()), flush=True)
    rows: list[dict[str, Any]] = []
    for name, n_processes in itertools.product(options.algorithms, (0, 1)):
        found = compare(partial(train, name, n_processes), options.seconds)
        rows.append({"part": "accuracy", "algorithm": name, "processes": 1 + n_processes, **found})
        path = write("profiler", rows)
        print(tables.text("profile_accuracy", rows[-1:]), flush=True)
    print(path)


if __name__ == "__main__":
    main()
