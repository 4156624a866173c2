"""REINFORCE on CartPole-v1 until it is solved: two processes collect, this one learns. `make demo` runs it."""

from __future__ import annotations

import gymnasium
import tyro

from rlstruct import VecEnv
from rlstruct.agents import ActorCritic, ActorCriticAgent
from rlstruct.algos.reinforce import ReinforceConfig, train
from rlstruct.algos.training.presets import PRESETS
from rlstruct.algos.training.run_folder import RunFolder
from rlstruct.envs import GymEnv


def create_env(n_envs: int, seed: int) -> VecEnv:
    return GymEnv([gymnasium.make("CartPole-v1") for _ in range(n_envs)], seed=seed)


def create_model() -> ActorCritic:
    return ActorCritic(n_inputs=4, n_actions=2)


def main() -> None:
    config = tyro.cli(ReinforceConfig, description=__doc__, default=PRESETS["reinforce", "CartPole-v1"].config)

    with RunFolder("reinforce-cartpole", config, n_env_steps=config.n_env_steps) as run:
        result = train(config, create_model, ActorCriticAgent, create_env, run=run)

    for when, evaluation in (("before", result.before), ("after", result.after)):
        print(
            f"Evaluation {when} training: mean return {evaluation.mean_return:.1f} of 500 "
            f"over {len(evaluation.returns)} episodes."
        )
    print(f"Trained on {result.env_steps:,} environment steps in {result.seconds:.1f} s.")
    print(f"Run folder: {run.path}")
    for file in ("checkpoint.pt", "metrics.csv", "events.out.tfevents.*", "learning_curve.png"):
        print(f"  {next(run.path.glob(file)).name}")


if __name__ == "__main__":
    main()
