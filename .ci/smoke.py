"""Use an installed rlstruct from outside the repository: import every module, and collect with an agent written here.

Usage: python smoke.py REPOSITORY. Nothing may be imported from REPOSITORY.
"""

from __future__ import annotations

import importlib
import pathlib
import pkgutil
import subprocess
import sys

import gymnasium
import torch

import rlstruct
from rlstruct import DictTensor, RL_Agent
from rlstruct.batchers import RL_Batcher
from rlstruct.envs import GymEnv
from rlstruct.functional import random

EXPECTED = {"rlstruct.core", "rlstruct.functional", "rlstruct.agents", "rlstruct.batchers", "rlstruct.algos"}


def import_everything() -> list[pathlib.Path]:
    """Import every module; return the files of those whose extras are installed."""
    names = [module.name for module in pkgutil.walk_packages(rlstruct.__path__, "rlstruct.")]
    files = []
    for name in names:
        try:
            files.append(pathlib.Path(importlib.import_module(name).__file__ or "").resolve())
        except ImportError as error:
            if "Install the extra" not in str(error) and not name.startswith("rlstruct.cli."):
                raise SystemExit(f"{name}, without its extra, says: {error}") from error
            # Otherwise the error names the missing extra; for commands, `main` does.
    if missing := EXPECTED - set(names):
        raise SystemExit(f"the package lacks {sorted(missing)}")
    return files


class CoinAgent(RL_Agent):
    """Tosses a coin for each environment."""

    def __call__(
        self, state: DictTensor, observation: DictTensor, agent_info: DictTensor, history: object = None
    ) -> tuple[DictTensor, DictTensor]:
        coin = random.uniform(observation["rng"]) < 0.5
        return DictTensor({"action": coin.to(torch.int64)}), state


def create_env(seed: int) -> GymEnv:
    return GymEnv([gymnasium.make("CartPole-v1") for _ in range(2)], seed)


def collect(n_processes: int) -> torch.Tensor:
    """Return the rewards of two whole episodes, [2, T]."""
    with RL_Batcher(500, CoinAgent, create_env, n_processes=n_processes, seed=0) as batcher:
        batcher.reset()
        batcher.execute()
        trajectories, n_still_running = batcher.get()
    if trajectories is None or n_still_running:
        raise SystemExit(f"expected two whole episodes; {n_still_running} still run")
    steps = trajectories.steps
    return steps["_observation/reward"] * steps.mask()


def check_commands() -> None:
    """Check that a command names its missing extra in one line, and that `rlstruct explain` works."""
    for command in ("train", "evaluate", "plot", "play"):
        run = subprocess.run([sys.executable, "-m", "rlstruct", command], capture_output=True, text=True)
        if run.returncode != 2 or "pip install 'tyro" not in run.stderr or run.stderr.count("\n") != 1:
            raise SystemExit(
                f"rlstruct {command} without its extra: exit code {run.returncode}, printed {run.stderr!r}"
            )
    page = subprocess.run([sys.executable, "-m", "rlstruct", "explain", "WorkerError"], capture_output=True, text=True)
    if page.returncode != 0 or not page.stdout.startswith("WorkerError\n"):
        raise SystemExit(f"rlstruct explain WorkerError: exit code {page.returncode}, printed {page.stderr!r}")


def main() -> None:
    repository = pathlib.Path(sys.argv[1]).resolve()
    files = import_everything()
    if ours := [str(file) for file in files if file.is_relative_to(repository)]:
        raise SystemExit(f"these came from the repository, not from the wheel: {ours}")
    print(f"{len(files)} modules imported from {pathlib.Path(rlstruct.__file__).parents[1]}")
    check_commands()
    here, spawned = collect(0), collect(1)
    if not torch.equal(here, spawned):
        raise SystemExit("the same seed gave different episodes in a worker process")
    print(f"two episodes of CartPole-v1, here and in a worker: returns {spawned.sum(1).tolist()}")


if __name__ == "__main__":
    main()
