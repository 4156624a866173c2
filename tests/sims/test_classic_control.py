"""The five classics against gymnasium: transitions from injected states, rewards, ends and frames."""

from __future__ import annotations

from dataclasses import fields

import gymnasium
import numpy as np
import pytest
import torch

from rlstruct.core import DictTensor
from rlstruct.sims import make

# From where states are drawn, field by field: well beyond what play visits, so that every branch and every end is hit.
RANGES = {
    "CartPole-v1": [(-2.6, 2.6), (-3, 3), (-0.24, 0.24), (-3, 3)],
    "Pendulum-v1": [(-20, 20), (-8, 8)],
    "Acrobot-v1": [(-np.pi, np.pi), (-np.pi, np.pi), (-4 * np.pi, 4 * np.pi), (-9 * np.pi, 9 * np.pi)],
    "MountainCar-v0": [(-1.2, 0.6), (-0.07, 0.07)],
    "MountainCarContinuous-v0": [(-1.2, 0.6), (-0.07, 0.07)],
}


def oracle(name: str, states: np.ndarray, actions: np.ndarray) -> tuple[np.ndarray, ...]:
    """One step of gymnasium's own environment from each state, as `rlstruct train` wraps it."""
    env = gymnasium.make(name).unwrapped
    env.reset(seed=0)
    box = env.action_space if isinstance(env.action_space, gymnasium.spaces.Box) else None
    actions = actions if box is None else actions.clip(box.low, box.high)
    frames, rewards, ends = [], [], []
    for state, action in zip(states, actions, strict=True):
        env.state = tuple(state) if name in ("CartPole-v1", "MountainCar-v0") else state.copy()
        if name == "CartPole-v1":
            env.steps_beyond_terminated = None
        frame, reward, terminated, _, _ = env.step(action)
        frames.append(frame)
        rewards.append(reward)
        ends.append(terminated)
    return np.array(frames), np.array(rewards, np.float64), np.array(ends)


def draw(name: str, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    states = np.stack([rng.uniform(low, high, n) for low, high in RANGES[name]], axis=1)
    space = make(name, 1).action_space
    if isinstance(space, gymnasium.spaces.Discrete):
        return states, rng.integers(0, space.n, n)
    return states, rng.uniform(1.5 * space.low, 1.5 * space.high, (n, 1)).astype(np.float32)  # many are clipped


def step_from(name: str, states: np.ndarray, actions: np.ndarray, dtype: torch.dtype) -> DictTensor:
    env = make(name, len(states), dtype=dtype)
    env.reset()
    kind = type(env.get_state())
    columns = torch.from_numpy(states).to(dtype)
    env.set_state(None, kind(*(columns[:, i] for i in range(len(fields(kind))))))
    (reached, _), _ = env.step(DictTensor({"action": torch.from_numpy(actions)}))
    return reached


@pytest.mark.parametrize("name", RANGES)
@pytest.mark.parametrize("n_transitions", [10_000, pytest.param(100_000, marks=pytest.mark.exhaustive)])
def test_equals_gymnasium_in_double_precision(name: str, n_transitions: int) -> None:
    states, actions = draw(name, n_transitions, np.random.default_rng(0))
    reached = step_from(name, states, actions, torch.float64)
    frames, rewards, ends = oracle(name, states, actions)
    # gymnasium hands frames over in float32: that rounding, 1.2e-7 relative, is all there is.
    np.testing.assert_allclose(reached["frame"].numpy(), frames, rtol=2e-7, atol=1e-7)
    np.testing.assert_allclose(reached["reward"].numpy(), rewards, rtol=2e-7, atol=1e-7)
    np.testing.assert_array_equal(reached["terminated"].numpy(), ends)
    assert not reached["truncated"].any()
    if name != "Pendulum-v1":
        assert 0.001 < ends.mean() < 0.999  # both kinds were compared


@pytest.mark.parametrize("name", RANGES)
def test_equals_gymnasium_in_single_precision(name: str) -> None:
    states, actions = draw(name, 20_000, np.random.default_rng(1))
    states = states.astype(np.float32).astype(np.float64)
    reached = step_from(name, states, actions, torch.float32)
    frames, rewards, ends = oracle(name, states, actions)
    # Some ten operations, each with a rounding of 6e-8 of its result; at 28 rad/s Acrobot makes much of a small one.
    tolerance = {"Acrobot-v1": 5e-3}.get(name, 5e-6)
    np.testing.assert_allclose(reached["frame"].numpy(), frames, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(reached["reward"].numpy(), rewards, rtol=tolerance, atol=tolerance)
    assert (reached["terminated"].numpy() != ends).mean() <= 1e-3  # those that rounding puts beyond the line


@pytest.mark.parametrize("name", RANGES)
def test_starts_where_gymnasium_does(name: str) -> None:
    env = make(name, 4096)
    first, _ = env.reset()
    low, high = first["frame"].min(dim=0).values, first["frame"].max(dim=0).values
    theirs = gymnasium.make(name)
    frames = np.array([theirs.reset(seed=seed)[0] for seed in range(4096)])
    spread = np.ptp(frames, axis=0) + 1e-3
    # Of 4,096 uniform numbers the least and the greatest lie within 1 % of the ends, but for one case in 10^17.
    np.testing.assert_allclose(low, frames.min(axis=0), atol=0.01 * spread.max())
    np.testing.assert_allclose(high, frames.max(axis=0), atol=0.01 * spread.max())
    assert env.time_limit == gymnasium.spec(name).max_episode_steps
    assert env.action_space == theirs.action_space
    np.testing.assert_allclose(env.observation_space.high, theirs.observation_space.high, rtol=1e-6)
    np.testing.assert_allclose(env.observation_space.low, theirs.observation_space.low, rtol=1e-6)


def test_the_default_dtype_changes_nothing() -> None:
    """States are float32 whatever torch's default is."""
    for name in RANGES:
        frames = []
        for dtype in (torch.float32, torch.float64):
            before = torch.get_default_dtype()
            torch.set_default_dtype(dtype)
            try:
                env = make(name, 8, seed=3)
                env.reset()
                action = torch.zeros(8, dtype=torch.int64)
                if not isinstance(env.action_space, gymnasium.spaces.Discrete):
                    action = torch.zeros(8, 1, dtype=torch.float32)
                frames.append([env.step(DictTensor({"action": action}))[1][0]["frame"] for _ in range(20)])
            finally:
                torch.set_default_dtype(before)
        assert all(torch.equal(one, other) for one, other in zip(*frames, strict=True)), name
