from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlstruct import DictTensor
from rlstruct.agents import RandomAgent
from rlstruct.functional.random import step_keys

N = 20_000
INF = float("inf")


def draw(space: spaces.Space[Any], n: int = N) -> DictTensor:
    rng = step_keys(torch.arange(n // 100), 0, torch.arange(100)).flatten()
    return RandomAgent(space)(DictTensor(), DictTensor({"rng": rng}), DictTensor())[0]


@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(5, start=-2),
        spaces.MultiDiscrete([2, 7], start=[1, -3]),
        spaces.MultiDiscrete(np.array([[2, 3], [4, 5]], dtype=np.int32)),
        spaces.MultiBinary((2, 3)),
        spaces.Box(-1.0, 3.0, (2,), np.float32),
        spaces.Box(-1.0, 3.0, (), np.float64),
        spaces.Box(0, 255, (3,), np.uint8),
        spaces.Box(-(2**63), 2**63 - 1, (2,), np.int64),
        spaces.Box(0, 2**64 - 1, (2,), np.uint64),
        spaces.Box(2**53 + 1, 2**53 + 2, (2,), np.int64),
        spaces.Discrete(3, start=2**60 + 1),
        spaces.Box(-1.7e308, 1.7e308, (2,), np.float64),
        spaces.Box(np.array([0.0, -INF, -INF]), np.array([INF, 5.0, INF]), dtype=np.float64),
    ],
    ids=str,
)
def test_draws_lie_in_the_space_with_its_dtype(space: spaces.Space[Any]) -> None:
    action = draw(space, 500)["action"].numpy()
    assert action.dtype == space.dtype
    assert action.shape[1:] == (space.shape or ())
    for row in action:
        assert space.contains(np.asarray(row)), row
    assert len(np.unique(action)) > 1


def test_nested_spaces_give_one_key_per_part_drawn_independently() -> None:
    space = spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Tuple([spaces.Discrete(2), spaces.Box(0.0, 1.0, (1,))])})
    action = draw(space)
    assert list(action.keys()) == ["action/a", "action/b/0", "action/b/1"]
    pair = torch.bincount(2 * action["action/a"] + action["action/b/0"], minlength=4) / N
    torch.testing.assert_close(pair, torch.full((4,), 0.25), rtol=0, atol=0.02)


def test_discrete_draws_and_binary_draws_are_uniform() -> None:
    counts = torch.bincount(draw(spaces.Discrete(4, start=3))["action"] - 3, minlength=4) / N
    torch.testing.assert_close(counts, torch.full((4,), 0.25), rtol=0, atol=0.02)
    ones = draw(spaces.MultiBinary(3))["action"].double().mean(dim=0)
    torch.testing.assert_close(ones, torch.full((3,), 0.5, dtype=torch.float64), rtol=0, atol=0.02)


def test_box_draws_have_the_moments_of_gymnasiums() -> None:
    space = spaces.Box(np.array([-1.0, 2.0, -INF, -INF]), np.array([3.0, INF, 5.0, INF]), dtype=np.float64)
    action = draw(space)["action"]
    # uniform on [-1, 3]; 2 + exponential; 5 - exponential; standard normal
    means = torch.tensor([1.0, 3.0, 4.0, 0.0], dtype=torch.float64)
    deviations = torch.tensor([4 / 12**0.5, 1.0, 1.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(action.mean(dim=0), means, rtol=0, atol=0.04)
    torch.testing.assert_close(action.std(dim=0), deviations, rtol=0, atol=0.05)


def test_integer_boxes_reach_both_ends() -> None:
    assert draw(spaces.Box(-1, 2, (1,), np.int32))["action"].unique().tolist() == [-1, 0, 1, 2]


def test_spaces_without_a_fixed_shape_are_named() -> None:
    with pytest.raises(TypeError, match=r"RandomAgent: space 'action/words' is Text"):
        RandomAgent(spaces.Dict({"words": spaces.Text(5)}))


def test_the_random_agent_accepts_and_ignores_weights() -> None:
    RandomAgent(spaces.Discrete(2)).update({"weight": torch.zeros(1)})
