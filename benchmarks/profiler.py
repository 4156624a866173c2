"""Is the profiler right? About ten minutes on two cores. Layer 6.

    python benchmarks/profiler.py [--algorithms dqn] [--seconds 60]

REINFORCE, A2C, DQN and PPO on CartPole, in one process and two. Stretches with and without a profile take turns within
one training. What a step takes in profiled ones, corrected, is divided by what it takes in the others, by the wall and
in CPU seconds; the ratio should be 1. Every row is written as it comes. `experiments.py --parts survey` says what the
profiler finds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import tables
import torch
from _profile_accuracy import Episodic, Restarting, Stretches, compare
from _report import machine, result_path, write

from rlstruct.agents import ActorCritic, ActorCriticAgent, QAgent, QNetwork
from rlstruct.algos import a2c, dqn, ppo, reinforce
from rlstruct.algos.training import run_training
from rlstruct.profiling.operations import SHARE

ACTOR_CRITIC = partial(ActorCritic, n_inputs=4, n_actions=2), ActorCriticAgent
Q_NETWORK = partial(QNetwork, n_inputs=4, n_actions=2), QAgent
TASKS: dict[str, tuple[Any, ...]] = {  # learner, settings, network, agent, environments
    "reinforce": (reinforce.ReinforceLearner, reinforce.ReinforceConfig(n_env_steps=10**12), *ACTOR_CRITIC, Episodic),
    "a2c": (a2c.A2CLearner, a2c.A2CConfig(n_env_steps=10**12), *ACTOR_CRITIC, Restarting),
    "dqn": (dqn.DQNLearner, dqn.DQNConfig(n_env_steps=10**12, learning_starts=200), *Q_NETWORK, Restarting),
    "ppo": (ppo.PPOLearner, ppo.PPOConfig(n_env_steps=10**12), *ACTOR_CRITIC, Restarting),
}


def train(name: str, n_processes: int, stretches: Stretches, board: Path) -> None:
    """Train from a fixed seed, without learning, until the stretches are over."""
    learner, settings, *factories = TASKS[name]
    config = replace(
        settings, n_envs=8, n_processes=n_processes, learning_rate=0.0, evaluation_processes=0, evaluation_episodes=1,
        evaluation_step_limit=10_000, evaluation_interval=10**9,
    )  # fmt: skip
    run_training(learner, config, *factories, env_args={"board": board}, create_evaluator=lambda _: stretches)


def measure_accuracy(names: Sequence[str], *, dry: bool, **how: float) -> None:
    """Compare stretches of trainings with and without a profile."""
    rows: list[dict[str, Any]] = []
    for name, n_processes in product(names, (0, 1)):
        found = compare(partial(train, name, n_processes), **how)
        rows.append({"part": "accuracy", "algorithm": name, "processes": 1 + n_processes, **found})
        if not dry:
            write("profiler", rows)
        print(tables.text("profile_accuracy", rows[-1:]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algorithms", nargs="+", choices=tuple(TASKS), default=tuple(TASKS))
    parser.add_argument("--seconds", type=float, default=60.0, help="of each of the eight kinds of training")
    parser.add_argument("--stretch", type=float, default=0.25, help="seconds with or without a profile in turn")
    parser.add_argument("--operators", type=float, default=SHARE, help="share of a profile with torch's operators")
    parser.add_argument("--dry", action="store_true", help="write no results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(machine()), flush=True)
    how = {"seconds": options.seconds, "stretch": options.stretch, "operators": options.operators}
    measure_accuracy(options.algorithms, dry=options.dry, **how)
    if not options.dry:
        print(result_path("profiler"))


if __name__ == "__main__":
    main()
