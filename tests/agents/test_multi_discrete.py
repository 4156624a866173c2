"""Spaces of several discrete choices: drawn, judged as torch.distributions does, and learned."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlstruct import DictTensor, TemporalDictTensor
from rlstruct.agents import ActorCritic, ActorCriticAgent, RecurrentActorCritic, RecurrentAgent
from rlstruct.algos import A2CConfig, a2c
from rlstruct.algos.learner import evaluate_actions
from rlstruct.envs import GymEnvInf
from rlstruct.functional.random import step_keys


def test_several_choices_at_once_are_drawn_and_judged_as_torch_does() -> None:
    sizes = (2, 5, 3)
    agent = ActorCriticAgent(ActorCritic(4, sizes, hidden=(8,)))
    with torch.no_grad():
        for weight in agent.model.actor.parameters():
            weight.normal_()
    key = step_keys(torch.arange(100), 0, torch.arange(100)).flatten()
    frame = torch.randn(1, 4).expand(len(key), 4)
    output, _ = agent(DictTensor(), DictTensor({"frame": frame, "rng": key}), DictTensor())
    action, logits = output["action"], output["action_logits"]
    assert action.shape == (len(key), 3)
    parts = [torch.distributions.Categorical(logits=logits[:, k, :n]) for k, n in enumerate(sizes)]
    expected = sum(part.log_prob(action[:, k]) for k, part in enumerate(parts))
    torch.testing.assert_close(output["log_probability"], expected)
    for k, part in enumerate(parts):
        counts = torch.bincount(action[:, k], minlength=sizes[k]) / len(key)
        assert (counts - part.probs[0]).abs().max() < 0.02
    assert torch.corrcoef(action.double().T)[0, 1].abs() < 0.03  # drawn independently
    steps = TemporalDictTensor({"action/action": action.view(100, 100, 3)})
    replayed = TemporalDictTensor({"action_logits": logits.view(100, 100, 3, 5)})
    log_probability, entropy = evaluate_actions(replayed, steps)
    torch.testing.assert_close(log_probability.flatten(), expected)
    torch.testing.assert_close(entropy.flatten(), sum(part.entropy() for part in parts))
    entropy.sum().backward()
    assert all(torch.isfinite(weight.grad).all() for weight in agent.model.actor.parameters())
    observation = DictTensor({"frame": frame, "rng": key})
    best, _ = ActorCriticAgent(agent.model, stochastic=False)(DictTensor(), observation, DictTensor())
    assert torch.equal(best["action"], logits.argmax(-1))


@pytest.mark.parametrize("size", [spaces.Discrete(3).n, np.array(3), torch.tensor(3)])
def test_a_size_is_a_number_of_numpy_or_torch_too(size: Any) -> None:
    assert ActorCritic(4, size)(torch.zeros(5, 4))[0].shape == (5, 3)


@pytest.mark.parametrize("sizes", [spaces.MultiDiscrete([3, 2]).nvec, torch.tensor([3, 2]), iter([3, 2])])
def test_sizes_are_numbers_of_numpy_or_torch_too(sizes: Any) -> None:
    several = ActorCritic(4, sizes)
    assert (several(torch.zeros(5, 4))[0][:, 1, 2] == -torch.inf).all()  # there is no third option


@pytest.mark.parametrize("recurrent", [False, True])
def test_several_choices_at_once_are_learnt(recurrent: bool) -> None:
    create_model = partial(RecurrentActorCritic, 2, (3, 2)) if recurrent else partial(ActorCritic, 2, (3, 2))
    config = A2CConfig(
        n_env_steps=12_000, n_timesteps=8, n_envs=16, learning_rate=0.01, evaluation_episodes=8,
        evaluation_processes=0, evaluation_interval=10**6, evaluation_timesteps=8, reward_scale=1.0, discount=0.5,
    )  # fmt: skip
    result = a2c.train(config, create_model, RecurrentAgent if recurrent else ActorCriticAgent, create_levers)
    assert result.after.mean_return > 14.0  # of 16; at random 8 * (1/3 + 1/2) = 6.7


class Levers(gymnasium.Env[Any, Any]):
    """Shows two bits for 8 steps; the right setting of lever 0 is the first bit plus 1, of lever 1 the second bit."""

    observation_space = spaces.Box(0.0, 1.0, (2,), np.float32)
    action_space = spaces.MultiDiscrete([3, 2])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.bits, self.time = self.np_random.integers(0, 2, 2), 0
        return self.bits.astype(np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward = float(action[0] == self.bits[0] + 1) + float(action[1] == self.bits[1])
        self.bits, self.time = self.np_random.integers(0, 2, 2), self.time + 1
        return self.bits.astype(np.float32), reward, self.time == 8, False, {}


def create_levers(n_envs: int, seed: int) -> GymEnvInf:
    return GymEnvInf([Levers() for _ in range(n_envs)], seed=seed)
