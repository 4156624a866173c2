"""Running statistics equal gymnasium's, travel with the weights, and leave the policy that acted as it was."""

from __future__ import annotations

import dataclasses
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.wrappers import NormalizeObservation, NormalizeReward
from gymnasium.wrappers.utils import RunningMeanStd
from torch import nn

from rlstruct import Trajectories
from rlstruct.agents import (
    ActorCritic,
    ActorCriticAgent,
    Normalised,
    QAgent,
    QNetwork,
    RandomAgent,
    RecurrentActorCritic,
    RecurrentAgent,
    RunningMoments,
)
from rlstruct.algos import A2CConfig, DQNConfig, ReinforceConfig, a2c, dqn, reinforce
from rlstruct.batchers import RL_Batcher
from rlstruct.envs import GymVectorEnv
from rlstruct.sims import make
from rlstruct.testing import forbid_host_sync


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_statistics_stay_wide_where_weights_are_narrow(dtype: torch.dtype) -> None:
    network = Normalised(ActorCritic(3, 2), (3,)).to(dtype)
    assert {weight.dtype for weight in network.parameters()} == {dtype}
    moments = [module for module in network.modules() if isinstance(module, RunningMoments)]
    assert moments
    for one in moments:
        assert {one.mean.dtype, one.variance.dtype, one.count.dtype} == {torch.float64}
        assert one.count.item() == 1e-4  # not rounded in between


def test_moments_of_batches_are_those_of_all_values_and_of_gymnasium() -> None:
    moments, reference = RunningMoments((3,)), RunningMeanStd(shape=(3,))
    generator = torch.Generator().manual_seed(0)
    for n in (1, 7, 100, 3):
        values = torch.randn(n, 3, generator=generator, dtype=torch.float64) * 5 + 1000
        mask = torch.rand(n, generator=generator) < 0.7
        with forbid_host_sync():
            moments.update(torch.where(mask.unsqueeze(1), values, torch.nan), mask)
        if mask.any():
            reference.update(values[mask].numpy())
        np.testing.assert_allclose(moments.mean, reference.mean, rtol=1e-12)
        np.testing.assert_allclose(moments.variance, reference.var, rtol=1e-9)
        assert moments.count.item() == pytest.approx(reference.count)


class Walk(gymnasium.Env[Any, Any]):
    """A random walk that never ends, with rewards that grow."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.at = np.zeros(2)
        return self.at, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.at = self.at + self.np_random.normal(size=2)
        return self.at, float(10 * self.at[0] + 3), False, False, {}


def test_frames_and_rewards_are_those_of_gymnasiums_wrappers() -> None:
    frames, rewards = NormalizeObservation(Walk()), NormalizeReward(Walk(), gamma=0.9)
    seen, raw, scaled = [frames.reset(seed=0)[0]], [], []
    rewards.reset(seed=0)
    for _ in range(200):
        seen.append(frames.step(0)[0])
        raw.append(frames.env.unwrapped.at[0] * 10 + 3)  # type: ignore[attr-defined]
        scaled.append(rewards.step(0)[1])
    model = Normalised(nn.Identity(), (2,), discount=0.9, clip=1e9)
    model.model.weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))  # says which dtype
    walk, at = Walk(), []
    at.append(walk.reset(seed=0)[0])
    at += [walk.step(0)[0] for _ in range(200)]
    all_frames = torch.tensor(np.array(at)).unsqueeze(0)
    model.see_frames(all_frames, torch.ones(1, 201, dtype=torch.bool))
    np.testing.assert_allclose(model(all_frames[:, -1])[0].detach().numpy(), seen[-1], rtol=1e-6)
    before = None
    for part in torch.tensor([raw], dtype=torch.float64).split(37, dim=1):  # several batches of one episode
        mask = torch.ones_like(part, dtype=torch.bool)
        before = model.see_rewards(part, ~mask, mask, before)
    np.testing.assert_allclose(model.scale_rewards(torch.tensor(raw[-1], dtype=torch.float64)), scaled[-1], rtol=1e-7)


def test_what_is_beyond_the_clip_is_cut() -> None:
    model = Normalised(ActorCritic(1, 2), (1,), discount=0.9, clip=2.0)
    assert model.scale_rewards(torch.tensor([-5.0, 1.0])).tolist() == pytest.approx([-2.0, 1.0])
    assert torch.equal(model(torch.tensor([[100.0]]))[1], model(torch.tensor([[3.0]]))[1])


def create_sim(n_envs: int, seed: int, auto_reset: bool = True) -> Any:
    return make("CartPole-v1", n_envs, seed, auto_reset=auto_reset, time_limit=60)


def create_cartpoles(n_envs: int, seed: int) -> GymVectorEnv:
    """Each restart takes a step of its row, which leaves padding in the batches."""
    return GymVectorEnv(gymnasium.make_vec("CartPole-v1", n_envs, "vector_entry_point"), seed)


def create_episodic_sim(n_envs: int, seed: int) -> Any:
    return create_sim(n_envs, seed, auto_reset=False)


def feed_forward() -> Normalised:
    return Normalised(ActorCritic(4, 2, hidden=(16,)), (4,), discount=0.99)


def recurrent() -> Normalised:
    return Normalised(RecurrentActorCritic(4, 2, n_hidden=8), (4,), discount=0.99)


def values() -> Normalised:
    return Normalised(QNetwork(4, 2, hidden=(16,)), (4,), discount=0.99)


SMALL: dict[str, Any] = {"n_envs": 4, "n_processes": 0, "evaluation_episodes": 2, "evaluation_processes": 0}
SMALL |= {"evaluation_interval": 10**6, "n_env_steps": 400}
PIECES = {**SMALL, "n_timesteps": 10, "evaluation_timesteps": 60}
KINDS: dict[str, tuple[Any, ...]] = {
    "a2c": (a2c, A2CConfig(**PIECES), feed_forward, ActorCriticAgent, create_sim),
    "a2c with memory": (a2c, A2CConfig(**PIECES), recurrent, RecurrentAgent, create_sim),
    "dqn": (dqn, DQNConfig(**PIECES, learning_starts=100, n_updates=1), values, QAgent, create_sim),
    "reinforce": (
        reinforce,
        ReinforceConfig(**SMALL, n_timesteps=60),
        feed_forward,
        ActorCriticAgent,
        create_episodic_sim,
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_learners_keep_the_statistics(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, config, *factories = KINDS[kind]
    seen: list[Trajectories] = []
    update = module.train.learner.update

    def watched(self: Any, trajectories: Trajectories, fraction_done: float) -> Any:
        seen.append(trajectories)
        return update(self, trajectories, fraction_done)

    monkeypatch.setattr(module.train.learner, "update", watched)
    result = module.train(dataclasses.replace(config), *factories)
    frames = torch.cat([batch.steps["observation/frame"][batch.mask()] for batch in seen]).double()
    statistics = result.model.frames
    assert statistics.count.item() == pytest.approx(len(frames), abs=1e-3)
    torch.testing.assert_close(statistics.mean, frames.mean(0), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(statistics.variance, frames.var(0, correction=0), rtol=1e-3, atol=1e-6)
    assert result.model.returns.count.item() == pytest.approx(len(frames), abs=1e-3)
    assert 1.0 < result.model.returns.variance.item() < 1000.0


@pytest.mark.parametrize("create_env", [create_sim, create_cartpoles])
def test_sums_of_rewards_begin_anew_with_each_episode_also_where_one_was_lost(create_env: Any) -> None:
    learner = a2c.A2CLearner.create(feed_forward(), ActorCriticAgent, A2CConfig(**PIECES))
    sums, seen = [0.0] * 4, []
    arguments: dict[str, Any] = {"agent_args": {"action_space": spaces.Discrete(2)}, "env_args": {"n_envs": 4}}
    with RL_Batcher(10, RandomAgent, create_env, **arguments, seed=0) as batcher:
        for i in range(9):
            if i % 4 == 0:  # in the middle of episodes
                batcher.reset()
            batcher.execute()
            batch, _ = batcher.get()
            learner.update(batch, 0.0)
            steps = batch.steps
            for b in range(4):
                for t in range(int(batch.lengths[b])):
                    begins = bool(steps["observation/initial_state"][b, t])
                    sums[b] = (0.0 if begins else 0.99 * sums[b]) + float(steps["_observation/reward"][b, t])
                    seen.append(sums[b])
    statistics: Any = learner.model.returns
    assert statistics.mean.item() == pytest.approx(np.mean(seen), rel=1e-5)
    assert statistics.variance.item() == pytest.approx(np.var(seen), rel=1e-4)


def test_a_replay_sees_the_frames_as_the_policy_that_acted_did(monkeypatch: pytest.MonkeyPatch) -> None:
    ratios: list[float] = []
    losses = a2c.losses

    def watched(replayed: Any, trajectories: Any, *rest: Any) -> Any:
        difference = replayed["log_probability"] - trajectories.steps["action/log_probability"]
        ratios.append(difference.abs().max().item())
        return losses(replayed, trajectories, *rest)

    monkeypatch.setattr(a2c, "losses", watched)
    module, config, *factories = KINDS["a2c"]
    module.train(config, *factories)
    assert len(ratios) == 10
    assert max(ratios) < 1e-6
