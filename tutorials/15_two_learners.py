"""Tutorial 15: two learners get the same result as one.

    python tutorials/15_two_learners.py

On the command line, for any training: `rlstruct train a2c --env CartPole-v1 --learners 2`. torchrun starts this script,
too: `torchrun --nproc-per-node 2 tutorials/15_two_learners.py`
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


# Each learner is a process that imports this file, so keep the training under this line, as with worker processes.
if __name__ == "__main__":
    # 1. Eight environments and sixteen steps: a batch is 8 x 16 steps, and the training has 20 updates.
    config = A2CConfig(
        n_env_steps=20 * 8 * 16, n_envs=8, n_timesteps=16, evaluation_processes=0, evaluation_episodes=4, seed=1
    )
    alone = train(config, create_model, ActorCriticAgent, create_env)

    # 2. The same settings with two learners. This process is the first of them and starts the other one. Each collects
    #    with four of the eight environments, and both take the same gradient step: the mean over the whole batch.
    together = train(replace(config, n_learners=2), create_model, ActorCriticAgent, create_env)

    # 3. So the training is the same, up to rounding. Only the speed differs: on a machine with idle cores, the two
    #    share collection and learning.
    differences = [
        (one - other).abs().max().item()
        for one, other in zip(alone.model.state_dict().values(), together.model.state_dict().values(), strict=True)
    ]
    print(f"{together.env_steps} environment steps; the weights differ by {max(differences):.1e} at most")
    assert max(differences) < 1e-4
    assert together.env_steps == alone.env_steps

    # 4. Settings count for all learners together, so they must be divisible by the number of learners.
    try:
        train(replace(config, n_envs=9, n_learners=2), create_model, ActorCriticAgent, create_env)
    except LearnerError as error:
        print(error)

# More: docs/scaling.md
