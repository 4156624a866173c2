"""Tutorial 05: A2C with short batches, exact episode ends, and GAE.

REINFORCE waits for whole episodes. A2C learns from batches of n steps, and a critic estimates the return after the last
one. That estimate depends on how a batch or an episode ends. Getting it wrong is a frequent bug that raises no error,
so this tutorial looks at ends before it trains.
"""

import gymnasium
import torch

from rlstruct.agents import ActorCritic, ActorCriticAgent
from rlstruct.algos.a2c import A2CConfig, train
from rlstruct.batchers import RL_Batcher
from rlstruct.envs import GymEnvInf, GymVectorEnv
from rlstruct.functional.advantages import generalized_advantage


def create_short_env(n_envs, seed):
    """Create CartPoles with episodes of at most 12 steps; GymEnvInf restarts them automatically."""
    return GymEnvInf([gymnasium.make("CartPole-v1", max_episode_steps=12) for _ in range(n_envs)], seed)


def create_env(n_envs, seed):
    """Create gymnasium's numpy CartPole, which steps all environments in one call."""
    return GymVectorEnv(gymnasium.make_vec("CartPole-v1", n_envs, vectorization_mode="vector_entry_point"), seed)


def create_model():
    return ActorCritic(n_inputs=4, n_actions=2)


def look_at_a_batch():
    """Collect one batch and look at the end of an episode inside it."""
    agent_args, env_args = {"model": create_model()}, {"n_envs": 3}
    with RL_Batcher(
        20, ActorCriticAgent, create_short_env, agent_args=agent_args, env_args=env_args, seed=0
    ) as batcher:
        batcher.reset()  # once: each execute() continues where the last batch ended
        batcher.execute()
        trajectories, _ = batcher.get()
    steps = trajectories.steps
    print("a batch is always full:", trajectories.lengths.tolist())
    row, t = (int(i[0]) for i in steps["_observation/done"].nonzero(as_tuple=True))
    reached, seen_next = steps["_observation/frame"][row, t], steps["observation/frame"][row, t + 1]
    print(
        f"environment {row} ended its episode in step {t}, truncated: {bool(steps['_observation/truncated'][row, t])}"
    )
    print("  it reached         ", [round(x, 2) for x in reached.tolist()], "<- the critic judges this one")
    print("  its next episode is", [round(x, 2) for x in seen_next.tolist()])
    assert not torch.equal(reached, seen_next)
    assert steps["observation/initial_state"][row, t + 1]


def advantages_by_hand():
    """Compute GAE over a row with a truncated episode, and a second one that is still running."""
    reward = torch.ones(1, 4)
    terminated = torch.tensor([[False, False, False, False]])
    done = torch.tensor([[False, True, False, False]])  # truncated after step 1
    value, next_value = torch.full((1, 4), 10.0), torch.full((1, 4), 10.0)
    options = {"value": value, "next_value": next_value, "discount": 0.9, "trace_decay": 0.5}
    cut = generalized_advantage(reward, terminated, done, torch.ones(1, 4), **options)
    # Where a time limit cut the episode, the value of the true last observation replaces the missing rewards: every
    # error is 1 + 0.9 * 10 - 10 = 0. The critic's value of 10 is right everywhere: 1 / (1 - 0.9) = 10.
    torch.testing.assert_close(cut, torch.zeros(1, 4))
    ended = generalized_advantage(reward, done, done, torch.ones(1, 4), **options)
    # After a termination no reward follows: the error is 1 - 10 = -9, and the step before gets 0.9 * 0.5 of it.
    torch.testing.assert_close(ended, torch.tensor([[-4.05, -9.0, 0.0, 0.0]]))
    print("advantages if truncated: ", [round(a, 2) for a in cut[0].tolist()])
    print("advantages if terminated:", [round(a, 2) for a in ended[0].tolist()])


if __name__ == "__main__":
    torch.set_num_threads(1)
    look_at_a_batch()
    advantages_by_hand()

    # The library's A2C has the same train() as REINFORCE, the same common settings, and a few more. The defaults suit
    # CartPole; rlstruct.algos.training.presets has settings tuned for other environments.
    config = A2CConfig(n_env_steps=40_000, evaluation_processes=0, evaluation_episodes=20)
    result = train(config, create_model, ActorCriticAgent, create_env)
    print(f"evaluation before {result.before.mean_return:.0f}, after {result.after.mean_return:.0f}")
    assert result.after.mean_return > 3 * result.before.mean_return

    # overlap=True starts to collect the next batch before it learns from this one. With worker processes both happen at
    # the same time. The weights that act are then one update old: the log shows this lag, and V-trace corrects for it.
    config = A2CConfig(n_env_steps=8_000, evaluation_processes=0, evaluation_episodes=8, overlap=True, vtrace=True)
    result = train(config, create_model, ActorCriticAgent, create_env)
    print("policy lag of each update:", [int(lag) for lag in result.losses["policy_lag"]])
    assert set(result.losses["policy_lag"][1:]) == {1.0}

# Next: 06; docs/algorithms/README.md compares the algorithms.
