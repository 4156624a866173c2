"""Tutorial 15: two learners. The same training in one process and in two, and why the result is the same.

    python tutorials/15_two_learners.py

The command does it for any training: rlstruct train a2c --env CartPole-v1 --learners 2; and so does torchrun:
torchrun --nproc-per-node 2 tutorials/15_two_learners.py
"""

from dataclasses import replace

from rlstruct.agents import ActorCritic, ActorCriticAgent
from rlstruct.algos.a2c import A2CConfig, train
from rlstruct.errors import LearnerError
from rlstruct.sims import make


def create_env(n_envs, seed):
    return make("CartPole-v1", n_envs, seed, auto_reset=True)


def create_model():
    return ActorCritic(n_inputs=4, n_actions=2)


# Learners are processes that import this file, so what trains stands under this line, as with worker processes.
if __name__ == "__main__":
    # 1. Eight environments, sixteen steps: a batch is 8 x 16 steps, and here are 20 updates.
    config = A2CConfig(
        n_env_steps=20 * 8 * 16, n_envs=8, n_timesteps=16, evaluation_processes=0, evaluation_episodes=4, seed=1
    )
    alone = train(config, create_model, ActorCriticAgent, create_env)

    # 2. The same settings with two learners. This process is the first of them and starts the other one. Each collects
    #    with four of the eight environments, and both take the same gradient step: the mean over the whole batch.
    together = train(replace(config, n_learners=2), create_model, ActorCriticAgent, create_env)

    # 3. So the training is the same, to the rounding of the sums. Only the speed is another: on a machine with idle
    #    cores, collecting and learning are shared by both.
    differences = [
        (one - other).abs().max().item()
        for one, other in zip(alone.model.state_dict().values(), together.model.state_dict().values(), strict=True)
    ]
    print(f"{together.env_steps} environment steps; the weights differ by {max(differences):.1e} at most")
    assert max(differences) < 1e-4
    assert together.env_steps == alone.env_steps

    # 4. The settings are those of all learners together, so they must be divisible.
    try:
        train(replace(config, n_envs=9, n_learners=2), create_model, ActorCriticAgent, create_env)
    except LearnerError as error:
        print(error)
