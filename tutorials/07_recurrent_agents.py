"""Tutorial 07: agents with a memory, their state, and how they learn.

An agent's state is a DictTensor that it returns with its action. The batcher passes it back unchanged at the next step,
even if that step is in another batch. If an episode ends inside a batch, the agent itself must reset its state:
``observation["initial_state"]`` says where.
"""

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from rlstruct import replay_agent
from rlstruct.agents import ActorCritic, ActorCriticAgent, RecurrentActorCritic, RecurrentAgent
from rlstruct.algos.a2c import A2CConfig, train
from rlstruct.batchers import RL_Batcher
from rlstruct.envs import GymEnvInf


class Recall(gymnasium.Env):
    """Shows -1 or 1 once, then 0 for three steps; the last action must say which it was."""

    observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = spaces.Discrete(2)
    delay = 3

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.cue, self.time = int(self.np_random.integers(2)), 0
        return np.array([2 * self.cue - 1, 0], np.float32), {}

    def step(self, action):
        self.time += 1
        last = self.time > self.delay
        right = last and int(action) == self.cue
        return np.array([0, self.time == self.delay], np.float32), float(right), last, False, {}


def create_env(n_envs, seed):
    return GymEnvInf([Recall() for _ in range(n_envs)], seed)


def create_feed_forward():
    return ActorCritic(n_inputs=2, n_actions=2, hidden=(32,))


def create_recurrent():
    return RecurrentActorCritic(n_inputs=2, n_actions=2, n_hidden=32)


def look_at_the_state():
    """Collect two batches and replay the second from the state that the agent had when it began."""
    torch.manual_seed(0)
    model = create_recurrent()
    with RL_Batcher(6, RecurrentAgent, create_env, agent_args={"model": model}, env_args={"n_envs": 2}, seed=0) as b:
        b.reset()
        for _ in range(2):
            b.execute()
            trajectories, _ = b.get()
    state = trajectories.info["agent_state/hidden"]
    print("state at the beginning of the second batch:", list(state.shape), "not zero:", bool((state != 0).any()))
    print("new episodes in it:", trajectories.steps["observation/initial_state"].int().tolist())
    # The learner calls the agent step by step from that state, with the same resets, and gets the same outputs.
    replayed = replay_agent(RecurrentAgent(model, copy_model=False), trajectories)
    stored = trajectories.steps["action/log_probability"]
    torch.testing.assert_close(replayed["log_probability"], stored, rtol=0, atol=1e-6)
    assert replayed["log_probability"].requires_grad


if __name__ == "__main__":
    torch.set_num_threads(1)
    look_at_the_state()

    # Both agents train with the same algorithm and settings; only the agent knows whether it has a memory. There are
    # two evaluations, before and after training, of 100 episodes of 4 steps each.
    config = A2CConfig(
        n_env_steps=20_000, n_timesteps=16, discount=0.9, entropy_coefficient=0.003, evaluation_episodes=100,
        evaluation_processes=0, evaluation_interval=10**6, evaluation_timesteps=4,
    )  # fmt: skip
    without = train(config, create_feed_forward, ActorCriticAgent, create_env)
    print(f"share of right answers without a memory: {without.after.mean_return:.2f}")
    having = train(config, create_recurrent, RecurrentAgent, create_env)
    print(f"share of right answers with a memory:    {having.after.mean_return:.2f}")
    assert without.after.mean_return < 0.7
    assert having.after.mean_return > 0.9

    # `python benchmarks/learn.py a2c_memory` does the same with a CartPole that hides its velocities.
