"""PQN: its targets are those of a plain loop, and a whole update equals one written in plain torch."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from test_ppo import IMAGE, ONE, VECTOR, create_toys
from torch import Tensor, nn

from rlstruct import DictTensor, TemporalDictTensor, Trajectories
from rlstruct.agents import ConvolutionalTrunk, QAgent, QNetwork, RecurrentQAgent, RecurrentQNetwork
from rlstruct.algos import pqn
from rlstruct.algos.pqn import PQNConfig, PQNLearner, train
from rlstruct.batchers import RL_Batcher
from rlstruct.envs import GymEnvInf
from rlstruct.functional import random

SMALL = PQNConfig(
    n_env_steps=480,
    n_timesteps=10,
    n_envs=6,
    n_epochs=2,
    n_minibatches=3,
    evaluation_episodes=2,
    evaluation_processes=0,
    evaluation_interval=10**6,
    evaluation_timesteps=25,
    log_interval=3,
)


def create_image_network() -> nn.Module:
    return nn.Sequential(ConvolutionalTrunk((1, 10, 10), n_features=8, layer_norm=True), nn.Linear(8, 3))


KINDS: dict[str, tuple[Callable[[], nn.Module], Any, Any]] = {
    "perceptron": (partial(QNetwork, 4, 3, hidden=(8, 8), layer_norm=True), QAgent, VECTOR),
    "images": (create_image_network, QAgent, IMAGE),
    "recurrent": (partial(RecurrentQNetwork, 4, 3, n_hidden=8, layer_norm=True), RecurrentQAgent, VECTOR),
}


def create_learner(kind: str, **changes: Any) -> PQNLearner:
    create_model, create_agent, _ = KINDS[kind]
    torch.manual_seed(1)
    return PQNLearner.create(create_model().double(), create_agent, dataclasses.replace(SMALL, **changes))


def collect(kind: str, learner: PQNLearner) -> Trajectories:
    """The second batch with the learner's weights, so that rows begin in the middle of episodes."""
    _, create_agent, frame = KINDS[kind]
    env_args = {"n_envs": SMALL.n_envs, "frame": frame, "action": ONE}
    agent_args = {"model": learner.model}
    with RL_Batcher(10, create_agent, create_toys, agent_args=agent_args, env_args=env_args, seed=5) as batcher:
        batcher.reset()
        for _ in range(2):
            batcher.execute(DictTensor({"epsilon": torch.full((6,), 0.5)}))
            trajectories, _ = batcher.get()
    return trajectories


# The reference: plain torch, loops over time, autograd and torch.optim.Adam.


def plain_targets(
    reward: Tensor, terminated: Tensor, done: Tensor, lengths: Tensor, next_value: Tensor, config: PQNConfig
) -> Tensor:
    """Targets of the real steps; 0 on padding."""
    out = torch.zeros_like(next_value)
    for b, length in enumerate(lengths.tolist()):
        following = 0.0
        for t in reversed(range(length)):
            one_step = float(next_value[b, t])
            cut = bool(done[b, t]) or t == length - 1
            rest = one_step if cut else config.trace_decay * following + (1 - config.trace_decay) * one_step
            goes_on = 0.0 if terminated[b, t] else 1.0
            following = float(reward[b, t]) * config.reward_scale + config.discount * goes_on * rest
            out[b, t] = following
    return out


def plain_values(model: Any, frames: Tensor, hidden: Tensor | None, initial: Tensor) -> tuple[Tensor, Tensor | None]:
    """Action values along rows [B, T], with the state set to zero where an episode begins; the states after."""
    if hidden is None:
        return model(frames.flatten(0, 1)).unflatten(0, frames.shape[:2]), None
    values, states = [], []
    for t in range(frames.shape[1]):
        value, hidden = model(frames[:, t], torch.where(initial[:, t].unsqueeze(1), 0.0, hidden))
        values.append(value)
        states.append(hidden)
    return torch.stack(values, 1), torch.stack(states, 1)


def plain_update(model: Any, trajectories: Trajectories, config: PQNConfig) -> None:
    steps = trajectories.steps
    recurrent = "agent_state/hidden" in trajectories.info.keys()
    hidden = trajectories.info["agent_state/hidden"] if recurrent else None
    frames, initial, action = (
        steps[key] for key in ("observation/frame", "observation/initial_state", "action/action")
    )
    with torch.no_grad():
        _, states = plain_values(model, frames, hidden, initial)
        reached = steps["_observation/frame"].flatten(0, 1)
        next_value = model(reached) if states is None else model(reached, states.flatten(0, 1))[0]
        ends = (steps["_observation/terminated"], steps["_observation/done"], steps.lengths)
        next_value = next_value.amax(1).view(action.shape)
        target = plain_targets(steps["_observation/reward"], *ends, next_value, config)
    B, T = action.shape
    rows = B if recurrent else B * T
    optimizer = torch.optim.Adam(model.parameters(), lr=config.learning_rate)
    for epoch in range(config.n_epochs):
        seed = random.purpose_seed(torch.tensor([config.seed]), "minibatches")
        order = random.step_keys(seed, epoch * config.n_minibatches, torch.arange(rows)).squeeze(1).argsort()
        for k in range(config.n_minibatches):
            chosen = order[rows * k // config.n_minibatches : rows * (k + 1) // config.n_minibatches]
            b, t = (chosen, slice(None)) if recurrent else (chosen // T, chosen % T)
            n = len(chosen)
            seen, fresh = frames[b, t].reshape(n, -1, *frames.shape[2:]), initial[b, t].reshape(n, -1)
            values, _ = plain_values(model, seen, None if hidden is None else hidden[chosen], fresh)
            value = values.gather(2, action[b, t].reshape(n, -1, 1)).squeeze(2)
            loss = 0.5 * ((value - target[b, t].reshape(n, -1)) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            if config.max_gradient_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), config.max_gradient_norm)
            optimizer.step()


@pytest.mark.parametrize("changes", [{}, {"max_gradient_norm": 0.01, "trace_decay": 0.5, "n_epochs": 3}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_update_equals_a_plain_one_in_every_parameter(kind: str, changes: dict[str, Any]) -> None:
    learner = create_learner(kind, **changes)
    trajectories = collect(kind, learner)
    ends = trajectories.steps["_observation/done"] & ~trajectories.steps["_observation/terminated"]
    assert ends.any()
    assert trajectories.steps["_observation/terminated"].any()
    reference, before = copy.deepcopy(learner.model), copy.deepcopy(learner.model)
    learner.update(trajectories, 0.0)
    plain_update(reference, trajectories, learner.config)
    for (name, weight), other, old in zip(
        learner.model.named_parameters(), reference.parameters(), before.parameters(), strict=True
    ):
        assert (weight - old).abs().max() > 1e-4, name
        torch.testing.assert_close(weight, other, rtol=0, atol=1e-7, msg=name)
    assert learner.policy_version == learner.config.n_epochs * 3


@given(st.integers(0, 2**31), st.integers(1, 7), st.sampled_from([0.0, 0.65, 1.0]), st.sampled_from([0.0, 0.9, 1.0]))
def test_the_targets_are_those_of_a_plain_loop(seed: int, n_steps: int, trace_decay: float, discount: float) -> None:
    """Also where an episode is terminated or truncated, where a row stops, and where the row is padded."""
    draw = torch.Generator().manual_seed(seed)
    shape, config = (4, n_steps), dataclasses.replace(SMALL, trace_decay=trace_decay, discount=discount)
    model = QNetwork(1, 2, hidden=(3,), layer_norm=True).double()
    lengths = torch.randint(1, n_steps + 1, (4,), generator=draw)
    done, which = (torch.rand(shape, generator=draw) < 0.4 for _ in range(2))
    frames, fresh = (torch.randn(*shape, 1, generator=draw, dtype=torch.float64) for _ in range(2))
    reached = torch.cat([frames[:, 1:], fresh[:, -1:]], 1)
    reached = torch.where(done.unsqueeze(2), fresh, reached)
    with torch.no_grad():
        values, next_values = model(frames.flatten(0, 1)), model(reached.flatten(0, 1))
    steps = {
        "observation/frame": frames,
        "observation/initial_state": torch.cat([torch.zeros(4, 1, dtype=torch.bool), done[:, :-1]], 1),
        "_observation/frame": reached,
        "_observation/reward": torch.randn(shape, generator=draw, dtype=torch.float64),
        "_observation/done": done,
        "_observation/terminated": done & which,
        "action/action": torch.randint(2, shape, generator=draw),
        "action/action_values": values.view(*shape, 2),
    }
    real = torch.arange(n_steps) < lengths.unsqueeze(1)
    for tensor in steps.values():
        if tensor.is_floating_point():
            tensor[~real] = torch.nan  # padding must not be read
    info = DictTensor({"policy_version": torch.zeros(4, dtype=torch.int64)})
    batch = Trajectories(info, TemporalDictTensor(steps, lengths))
    prepared, _ = PQNLearner.create(model, QAgent, config).prepare(batch)
    expected = plain_targets(
        steps["_observation/reward"],
        steps["_observation/terminated"],
        done,
        lengths,
        next_values.amax(1).view(shape),
        config,
    )
    found = prepared.rows.steps["learner/target"].view(shape)
    torch.testing.assert_close(found[real], expected[real], rtol=0, atol=1e-12)
    assert prepared.rows.lengths.view(shape).bool().equal(real)


def test_the_losses_by_hand() -> None:
    values = torch.tensor([[[1.0, 5.0], [2.0, 0.0], [9.0, 9.0]]], requires_grad=True)
    steps = {"action/action": torch.tensor([[0, 1, 1]]), "learner/target": torch.tensor([[3.0, -1.0, 7.0]])}
    info = DictTensor({"policy_version": torch.zeros(1, dtype=torch.int64)})
    minibatch = Trajectories(info, TemporalDictTensor(steps, torch.tensor([2])))
    terms = pqn.losses(TemporalDictTensor({"action_values": values}), minibatch)
    # Errors 1 - 3 and 0 + 1.
    assert {name: term.item() for name, term in terms.items()} == {"loss": 1.25, "value": 0.5, "error": 1.5}
    terms["loss"].backward()
    assert values.grad is not None
    assert values.grad.tolist() == [[[-1.0, 0.0], [0.0, 0.5], [0.0, 0.0]]]


def test_the_values_that_a_batch_holds_are_those_of_a_replay() -> None:
    learner = create_learner("perceptron")
    trajectories = collect("perceptron", learner)
    kept = {key: value for key, value in trajectories.steps.items() if key != "action/action_values"}
    without = Trajectories(trajectories.info, TemporalDictTensor(kept, trajectories.lengths))
    one, other = (learner.prepare(batch)[0].rows.steps["learner/target"] for batch in (trajectories, without))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_epsilon_falls_in_its_share_of_the_training_and_is_the_same_everywhere() -> None:
    learner = create_learner("perceptron", initial_epsilon=0.9, final_epsilon=0.1, epsilon_fraction=0.5)
    found = [learner.agent_info(done, 3)["epsilon"].tolist() for done in (0.0, 0.25, 0.5, 1.0)]
    assert found == [pytest.approx([epsilon] * 3) for epsilon in (0.9, 0.5, 0.1, 0.1)]


@pytest.mark.parametrize("kind", KINDS)
def test_environments_of_gymnasium_are_learned_from(kind: str) -> None:
    create_model, create_agent, frame = KINDS[kind]
    result = train(SMALL, create_model, create_agent, create_toys, env_args={"frame": frame, "action": ONE})
    assert set(result.losses) == {"loss", "value", "error", "gradient_norm", "policy_lag"}
    assert len(result.losses["loss"]) == 8


class Recall(gymnasium.Env[Any, Any]):
    """Shows -1 or 1, then 0 twice, and rewards the last action if it says which number it was."""

    observation_space, action_space = spaces.Box(-1.0, 1.0, (1,), np.float32), spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.taken, self.shown = 0, int(self.np_random.integers(2))
        return np.array([2.0 * self.shown - 1.0], np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.taken += 1
        ended = self.taken == 3
        return np.zeros(1, np.float32), float(ended and action == self.shown), ended, False, {}


def create_recall(n_envs: int, seed: int) -> GymEnvInf:
    return GymEnvInf([Recall() for _ in range(n_envs)], seed=seed)


@pytest.mark.slow
def test_a_memory_learns_what_the_frame_does_not_show() -> None:
    config = dataclasses.replace(
        SMALL, n_env_steps=20_000, n_envs=16, n_timesteps=12, reward_scale=1.0, learning_rate=0.003,
        evaluation_episodes=100,
    )  # fmt: skip
    create_model = partial(RecurrentQNetwork, 1, 2, n_hidden=16, layer_norm=True)
    result = train(config, create_model, RecurrentQAgent, create_recall)
    assert result.before.mean_return < 0.75 < result.after.mean_return  # without a memory 0.5
