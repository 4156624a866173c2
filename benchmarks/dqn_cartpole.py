"""DQN on CartPole-v1 for ten seeds: environment steps to a mean evaluation return of 475, and the final return.

Run: ``python benchmarks/dqn_cartpole.py``; ``--seeds 0 1`` for some of them. A training ends when an evaluation over
100 greedy episodes has a mean return of 475, or after 100,000 steps; the network of that moment is then evaluated once
more, on 100 fresh episodes, which gives the final return. ``--to-the-end`` trains on.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import _report
import gymnasium
import torch

from rlstruct import VecEnv
from rlstruct.agents import QAgent, QNetwork
from rlstruct.algos.dqn import DQNConfig, train
from rlstruct.envs import GymVectorEnv

TARGET = 475.0


def create_env(n_envs: int, seed: int) -> VecEnv:
    return GymVectorEnv(gymnasium.make_vec("CartPole-v1", n_envs, vectorization_mode="vector_entry_point"), seed=seed)


def create_model() -> QNetwork:
    return QNetwork(n_inputs=4, n_actions=2, duelling=True)


def measure(seed: int, target_return: float | None) -> dict[str, Any]:
    config = DQNConfig(
        seed=seed,
        evaluation_episodes=100,
        evaluation_processes=0,
        evaluation_interval=2500,
        target_return=target_return,
    )
    start = time.perf_counter()
    result = train(config, create_model, QAgent, create_env)
    reached = [evaluation.env_steps for evaluation in result.evaluations if evaluation.mean_return >= TARGET]
    return {
        "seed": seed,
        "steps_to_475": reached[0] if reached else None,
        "final_return": round(result.after.mean_return, 1),
        "final_std": round(result.after.std_return, 1),
        "env_steps": result.env_steps,
        "seconds": round(time.perf_counter() - start, 1),
        "returns": {evaluation.env_steps: round(evaluation.mean_return, 1) for evaluation in result.evaluations},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(10)))
    parser.add_argument("--to-the-end", action="store_true", help="train for 100,000 steps, whatever was reached")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| seed | environment steps to 475 | final return (100 episodes) | environment steps | seconds |")
    print("|---:|---:|---:|---:|---:|")
    rows = []
    for seed in options.seeds:
        rows.append(row := measure(seed, None if options.to_the_end else TARGET))
        reached = "never" if row["steps_to_475"] is None else f"{row['steps_to_475']:,}"
        final = f"{row['final_return']:.1f} ± {row['final_std']:.1f}"
        print(f"| {seed} | {reached} | {final} | {row['env_steps']:,} | {row['seconds']:.1f} |", flush=True)
    good = sum(row["final_return"] >= TARGET for row in rows)
    print(f"\n{good} of {len(rows)} seeds end at {TARGET:.0f} or more. Machine: {_report.machine()}")
    print(f"Written: {_report.write('dqn_cartpole', rows)}")


if __name__ == "__main__":
    main()
