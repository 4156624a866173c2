"""The network in the kernel is the agent's network: its trajectories are those of the batcher."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rlstruct.agents import MLP, ActorCritic, ActorCriticAgent
from rlstruct.batchers import RL_Batcher
from rlstruct.core import TemporalDictTensor, Trajectories
from rlstruct.functional.categorical import log_probability
from rlstruct.functional.random import categorical
from rlstruct.sims import PolicyRollout, make
from rlstruct.testing import forbid_host_sync

pytest.importorskip("warp", reason="needs the extra warp")
T = 24


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def decided(n_inputs: int, n_actions: int, device: str, **settings: Any) -> ActorCritic:
    """A policy that is far from uniform, so that logits matter."""
    torch.manual_seed(3)
    model = ActorCritic(n_inputs, n_actions, **settings)
    with torch.no_grad():
        for parameter in model.actor.parameters():
            parameter.normal_(0, 0.4)
    return model.to(device)


def create_env(name: str, n_envs: int, seed: int, device: str) -> Any:
    return make(name, n_envs, seed=seed, device=device, backend="warp", time_limit=20)


def create_agent(model: nn.Module) -> ActorCriticAgent:
    return ActorCriticAgent(model)


def check_decisions(batch: Trajectories, model: nn.Module) -> None:
    """What the network says about the frames that were seen, step by step: no divergence adds up."""
    steps = {key: value.flatten(0, 1) for key, value in batch.trajectories.items()}
    with torch.no_grad():
        logits, value = model(steps["observation/frame"])
    taken = steps["action/action"]
    torch.testing.assert_close(steps["action/action_logits"], logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(steps["action/log_probability"], log_probability(logits, taken), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(steps["action/value"], value, rtol=1e-4, atol=1e-4)
    # Rounding flips a draw that lies within 1e-7 of a threshold.
    assert (categorical(logits, steps["observation/rng"]) == taken).float().mean() > 0.999


def test_trajectories_are_those_of_the_batcher(device: str) -> None:
    model, B = decided(4, 2, device), 64
    rollout = PolicyRollout(create_env("CartPole-v1", B, 5, device), model, n_timesteps=T, seed=5)
    batcher = RL_Batcher(
        n_timesteps=T,
        create_agent=create_agent,
        create_env=create_env,
        agent_args={"model": model},
        env_args={"name": "CartPole-v1", "n_envs": B, "device": device},
        n_processes=0,
        seed=5,
        device=device,
    )
    with batcher:
        for number in range(3):
            if number in (0, 2):
                batcher.reset()
            if number == 2:
                rollout.reset()
            batcher.execute()
            expected, _ = batcher.get()
            got = rollout.collect()
            assert expected is not None
            check_decisions(got, model)
            assert got.trajectories.keys() == expected.trajectories.keys()
            assert got.info.keys() == expected.info.keys()
            same = (got.trajectories["action/action"] == expected.trajectories["action/action"]).all(1)  # [B]
            assert same.float().mean() > 0.98  # a flipped draw changes all that follows in its row
            for key in got.info.keys():
                assert torch.equal(got.info[key], expected.info[key]), key
            for key in got.trajectories.keys():
                a, b = got.trajectories[key][same], expected.trajectories[key][same]
                assert a.dtype == b.dtype
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, msg=key)
            if not bool(same.all()):
                break  # from here on the two are on different paths


def test_the_simulation_is_that_of_the_same_actions(device: str) -> None:
    """Zero divergence: the actions that the network took, as a plan, give the same bits."""
    model = decided(4, 2, device)
    rollout = PolicyRollout(create_env("CartPole-v1", 32, 1, device), model, n_timesteps=T, seed=1)
    forced = create_env("CartPole-v1", 32, 1, device)
    forced.reset()
    for _ in range(2):
        batch = rollout.collect().trajectories
        (reached, _), (current, _) = forced.rollout(TemporalDictTensor({"action": batch["action/action"]}))
        # The CPU's compiler makes the same of the game in both kernels; a GPU's may contract a x b + c in one of them.
        close = {"rtol": 0, "atol": 0} if device == "cpu" else {"rtol": 1e-4, "atol": 1e-4}
        for key in reached.keys():
            torch.testing.assert_close(batch[f"_observation/{key}"], reached[key], **close, msg=key)
            torch.testing.assert_close(batch[f"observation/{key}"][:, 1:], current[key][:, :-1], **close, msg=key)


def test_weights_are_copied_and_updated(device: str) -> None:
    model = decided(4, 2, device)
    rollout = PolicyRollout(create_env("CartPole-v1", 16, 1, device), model, n_timesteps=T)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert rollout.collect().trajectories["action/action_logits"].abs().min() > 0
    rollout.update(model.state_dict())
    with forbid_host_sync():
        batch = rollout.collect()
    assert not batch.trajectories["action/action_logits"].any()
    assert not batch.trajectories["action/value"].any()
    assert bool((batch.info["policy_version"] == 1).all())
    assert bool((batch.info["step"] == T).all())


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "hidden", "activation"),
    [("CartPole-v1", (30,), nn.Tanh), ("Acrobot-v1", (64, 64), nn.ReLU), ("MountainCar-v0", (8, 8, 8), nn.Tanh)],
)
def test_other_games_and_networks(name: str, hidden: tuple[int, ...], activation: type[nn.Module], device: str) -> None:
    env = create_env(name, 2048, 3, device)
    n_inputs, n_actions = env.observation_space.shape[0], int(env.action_space.n)
    model = decided(n_inputs, n_actions, device, hidden=hidden)
    model.actor = MLP(n_inputs, n_actions, hidden=hidden, activation=activation).to(device)
    model.critic = MLP(n_inputs, 1, hidden=hidden, activation=activation).to(device)
    rollout = PolicyRollout(env, model, n_timesteps=T)
    for _ in range(2):
        check_decisions(rollout.collect(), model)


@pytest.mark.parametrize(
    ("settings", "model", "words"),
    [
        ({"backend": "torch"}, ActorCritic(4, 2), "got backend='torch'"),
        ({"auto_reset": False}, ActorCritic(4, 2), "auto_reset=False"),
        ({}, ActorCritic(4, 3), "2 logits and one value"),
        ({}, ActorCritic(4, 2, hidden=(8, 16)), "all of one width"),
        ({}, nn.Linear(4, 2), "Linear.actor consists of"),
    ],
)
def test_what_the_kernel_cannot_evaluate_is_said(settings: dict, model: nn.Module, words: str) -> None:
    env = make("CartPole-v1", 2, **{"backend": "warp", **settings})
    with pytest.raises(ValueError, match=words):
        PolicyRollout(env, model, n_timesteps=4)
