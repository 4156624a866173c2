"""REINFORCE on CartPole-v1: two processes collect, one evaluates, this one learns. `make demo` runs it."""

from __future__ import annotations

import argparse
from pathlib import Path

import gymnasium
import torch

from rlstruct import VecEnv
from rlstruct.agents import ActorCritic, ActorCriticAgent
from rlstruct.algos.reinforce import ReinforceConfig, train
from rlstruct.algos.run_folder import RunFolder
from rlstruct.envs import GymEnv


def create_env(n_envs: int, seed: int) -> VecEnv:
    return GymEnv([gymnasium.make("CartPole-v1") for _ in range(n_envs)], seed=seed)


def create_model() -> ActorCritic:
    return ActorCritic(n_inputs=4, n_actions=2)


def main() -> None:
    defaults = ReinforceConfig()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--n-env-steps", type=int, default=defaults.n_env_steps, help="environment steps to train on")
    parser.add_argument("--n-processes", type=int, default=defaults.n_processes, help="processes that collect")
    parser.add_argument("--seed", type=int, default=defaults.seed, help="of weights and environments")
    parser.add_argument("--learner-device", default=defaults.learner_device, help="where losses are computed")
    parser.add_argument("--batcher-device", default=defaults.batcher_device, help="where the agent acts")
    parser.add_argument("--evaluation-device", default=defaults.evaluation_device, help="where it is evaluated")
    parser.add_argument("--runs", default="runs", help="folder of all runs")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the network is small, and the other processes want the other cores

    settings = {name: value for name, value in vars(options).items() if name != "runs"}
    config = ReinforceConfig(**settings, evaluation_episodes=100)
    with RunFolder("reinforce-cartpole", config, n_env_steps=config.n_env_steps, root=options.runs) as run:
        result = train(config, create_model, ActorCriticAgent, create_env, run=run)

    for when, evaluation in (("before", result.before), ("after", result.after)):
        print(
            f"Evaluation {when} training: mean return {evaluation.mean_return:.1f} of 500 "
            f"over {len(evaluation.returns)} episodes."
        )
    print(f"Trained on {result.env_steps:,} environment steps in {result.seconds:.1f} s.")
    print(f"Run folder: {run.path}")
    for file in ("checkpoint.pt", "metrics.csv", "events.out.tfevents.*", "learning_curve.png"):
        print(f"  {next(Path(run.path).glob(file)).name}")


if __name__ == "__main__":
    main()
