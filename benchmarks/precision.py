"""Returns and seconds of trainings in float32 and with products in bfloat16, on the same seeds.

Run: ``python benchmarks/precision.py``. Three tasks, four seeds each, which no settings were chosen with; every update
and simulator is compiled, in one process with one thread. The result is written after every training, and what is
written already is not trained again.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from common.learning import learning_seconds
from common.reporting import write, written

from rlstruct import agents
from rlstruct.algos import ppo, sac
from rlstruct.sims import make

COMPILED = {"compile_update": True, "compile_simulator": True, "threads": 1, "evaluation_processes": 0}
EVALUATED = {"evaluation_episodes": 100, "evaluation_interval": 1_000_000}


def minatar(game: str, channels: int, n_actions: int) -> Callable[..., Any]:
    config = ppo.PPOConfig(
        n_env_steps=1_000_000, n_envs=128, n_timesteps=32, n_minibatches=8, reward_scale=1.0, trace_decay=0.95,
        evaluation_timesteps=200, **COMPILED, **EVALUATED,
    )  # fmt: skip
    create_model = partial(agents.ActorCritic, 100 * channels, n_actions, hidden=(128, 128))

    def train(**changes: Any) -> Any:  # noqa: ANN401 - a TrainingResult
        changed = dataclasses.replace(config, **changes)
        return ppo.train(changed, create_model, agents.ActorCriticAgent, partial(make, f"{game}-MinAtar"))

    return train


def pendulum(**changes: Any) -> Any:  # noqa: ANN401 - a TrainingResult
    config = sac.SACConfig(n_env_steps=12_000, n_processes=0, **COMPILED, **EVALUATED, **changes)
    create_model = partial(agents.SoftActorCritic, 3, (-2.0,), (2.0,))
    return sac.train(config, create_model, agents.SquashedGaussianAgent, partial(make, "Pendulum-v1"))


TRAININGS: dict[str, Callable[..., Any]] = {
    "PPO, Breakout-MinAtar, 1,000,000 steps, 128-128": minatar("Breakout", 4, 3),
    "PPO, Asterix-MinAtar, 1,000,000 steps, 128-128": minatar("Asterix", 4, 5),
    "SAC, Pendulum-v1, 12,000 steps, 256-256": pendulum,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[300, 301, 302, 303])
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = written("precision")
    trained = {(row["task"], row["seed"], row["precision"]) for row in rows}
    for task, train in TRAININGS.items():
        for seed in options.seeds:
            for precision in ("float32", "bfloat16"):
                if (task, seed, precision) in trained:
                    continue
                result = train(seed=seed, precision=precision)
                final, seconds = round(result.after.mean_return, 1), round(learning_seconds(result), 1)
                rows.append({"task": task, "seed": seed, "precision": precision, "return": final, "seconds": seconds})
                print(f"{task}, seed {seed}, {precision}: {final}, {seconds} s", flush=True)
                write("precision", rows)
