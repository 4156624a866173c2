"""The densities of SAC's agent are exact within any bounds, and its critics share nothing."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from random_observations import observe
from torch import nn
from torch.distributions import AffineTransform, Independent, Normal, TanhTransform, TransformedDistribution

from rlstruct import DictTensor
from rlstruct.agents import Critics, SoftActorCritic, SquashedGaussianAgent

LOW, HIGH = (-1.0, 0.0), (3.0, 0.5)


def make_agent(**arguments: Any) -> SquashedGaussianAgent:
    torch.manual_seed(1)
    return SquashedGaussianAgent(SoftActorCritic(3, LOW, HIGH, hidden=(8,)), **arguments)


def test_it_sees_a_dict_observation_as_one_vector_in_the_order_of_the_names() -> None:
    agent, seen = make_agent(), observe(5, 3)
    parts = {"frame/b": seen["frame"][:, 1:], "frame/a": seen["frame"][:, :1], "rng": seen["rng"]}
    plain, _ = agent(DictTensor(), seen, DictTensor())
    nested, _ = agent(DictTensor(), DictTensor(parts), DictTensor())
    torch.testing.assert_close(dict(nested.items()), dict(plain.items()), rtol=0, atol=0)


def test_densities_are_those_of_torchs_own_distribution_scaled_to_the_bounds() -> None:
    agent, seen = make_agent(), observe(200, 3)
    found, _ = agent(DictTensor(), seen, DictTensor())
    mean, log_std = agent.model(seen["frame"]).double().chunk(2, -1)
    assert log_std.min() >= -5.0
    assert log_std.max() <= 2.0
    # From -1..1 to -1..3 and 0..0.5.
    affine = AffineTransform(torch.tensor([1.0, 0.25]).double(), torch.tensor([2.0, 0.25]).double(), event_dim=1)
    oracle = TransformedDistribution(Independent(Normal(mean, log_std.exp()), 1), [TanhTransform(), affine])
    inside = (torch.tanh((found["action"] - torch.tensor([1.0, 0.25])) / torch.tensor([2.0, 0.25])).abs() < 0.76).all(
        -1
    )
    assert inside.sum() > 100  # nearer to the bounds float32 does not hold the action well enough for the oracle
    expected = oracle.log_prob(found["action"].double())[inside].float()
    torch.testing.assert_close(found["log_probability"][inside], expected, rtol=1e-3, atol=1e-3)
    best, _ = make_agent(stochastic=False)(DictTensor(), seen, DictTensor())
    middle = torch.tensor([1.0, 0.25]) + torch.tensor([2.0, 0.25]) * torch.tanh(mean.float())
    torch.testing.assert_close(best["action"], middle)


def test_epsilon_draws_uniform_actions_within_the_bounds_with_their_density() -> None:
    agent, seen = make_agent(), observe(4000, 3)
    epsilon = torch.zeros(4000)
    plain, _ = agent(DictTensor(), seen, DictTensor())
    none, _ = agent(DictTensor(), seen, DictTensor({"epsilon": epsilon}))
    assert all(torch.equal(none[key], plain[key]) for key in plain.keys())
    epsilon[:2000] = 1.0
    found, _ = agent(DictTensor(), seen, DictTensor({"epsilon": epsilon}))
    action = found["action"][:2000]
    assert torch.equal(found["action"][2000:], plain["action"][2000:])
    assert (action >= torch.tensor(LOW)).all()
    assert (action <= torch.tensor(HIGH)).all()
    for i, width in enumerate((4.0, 0.5)):
        shares = torch.histc((action[:, i] - LOW[i]) / width, bins=4, min=0.0, max=1.0) / 2000
        torch.testing.assert_close(shares, torch.full((4,), 0.25), rtol=0, atol=0.04)
    torch.testing.assert_close(found["log_probability"][:2000], torch.full((2000,), -math.log(4.0 * 0.5)))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_saturated_actions_are_in_the_box(dtype: type[np.floating[Any]]) -> None:
    # Every pair of bounds with one decimal; a third of them was left by a rounding.
    pairs = [(low / 10, high / 10) for low in range(-30, 30) for high in range(low + 1, 31)]
    space = Box(*(np.array(bound, dtype) for bound in zip(*pairs, strict=True)), dtype=dtype)
    model = SoftActorCritic(1, space.low.tolist(), space.high.tolist(), hidden=(2,))
    for sign in (-1.0, 1.0):
        with torch.no_grad():
            model.actor.layers[-1].bias[: len(pairs)] = 20 * sign
        for stochastic in (True, False):
            agent = SquashedGaussianAgent(model, stochastic=stochastic)
            action = agent(DictTensor(), observe(4, 1), DictTensor())[0]["action"].detach().numpy()
            bound = space.high if sign > 0 else space.low
            np.testing.assert_allclose(action, np.broadcast_to(bound, action.shape), rtol=1e-3, atol=1e-6)
            assert all(space.contains(row.astype(dtype)) for row in action)


def test_a_network_that_knows_no_bounds_is_not_clamped() -> None:
    model = nn.Linear(1, 2)
    model.center, model.scale = torch.tensor([2.0]), torch.tensor([3.0])
    agent, seen = SquashedGaussianAgent(model, stochastic=False), observe(4, 1)
    action = agent(DictTensor(), seen, DictTensor())[0]["action"]
    torch.testing.assert_close(action, 2.0 + 3.0 * torch.tanh(model(seen["frame"])[:, :1]))


def test_critics_are_networks_that_share_nothing_and_can_be_constant() -> None:
    critics = Critics(5, hidden=(8, 6))
    frame, action = torch.randn(7, 3), torch.randn(7, 2, requires_grad=True)
    values = critics(frame, action)
    for n in range(2):
        x = torch.cat([frame, action], -1)
        for i, (weight, bias) in enumerate(zip(critics.weights, critics.biases, strict=True)):
            x = nn.functional.linear(x, weight[n], bias[n, 0])
            x = x if i == 2 else x.relu()
        torch.testing.assert_close(values[n], x.squeeze(-1))
    assert not torch.equal(values[0], values[1])
    (first,) = torch.autograd.grad(values[0].sum(), critics.weights[0], retain_graph=True)
    assert (first[1] == 0).all()
    assert (first[0] != 0).any()
    constant = critics(frame, action, constant=True)
    assert torch.equal(constant, values)
    found = torch.autograd.grad(constant.sum(), [action, *critics.parameters()], allow_unused=True)
    assert torch.equal(found[0], *torch.autograd.grad(values.sum(), action))
    assert all(one is None for one in found[1:])


def test_normalised_critics_share_nothing_and_can_be_constant() -> None:
    critics = Critics(5, hidden=(8, 6), layer_norm=True)
    with torch.no_grad():
        for weight in (*critics.gains, *critics.shifts):
            weight.copy_(torch.randn_like(weight))
    frame, action = torch.randn(7, 3), torch.randn(7, 2, requires_grad=True)
    values = critics(frame, action)
    for n in range(2):
        x = torch.cat([frame, action], -1)
        for i, (weight, bias) in enumerate(zip(critics.weights, critics.biases, strict=True)):
            x = nn.functional.linear(x, weight[n], bias[n, 0])
            if i < 2:
                x = nn.functional.layer_norm(x, x.shape[-1:], critics.gains[i][n, 0], critics.shifts[i][n, 0]).relu()
        torch.testing.assert_close(values[n], x.squeeze(-1))
    constant = critics(frame, action, constant=True)
    found = torch.autograd.grad(constant.sum(), [action, *critics.parameters()], allow_unused=True)
    torch.testing.assert_close(found[0], *torch.autograd.grad(values.sum(), action))
    assert all(one is None for one in found[1:])


def test_the_value_of_a_distribution_is_its_mean() -> None:
    critics = Critics(5, hidden=(8,), n_critics=3, n_atoms=4, value_range=(-1, 5))
    frame, action = torch.randn(7, 3), torch.randn(7, 2)
    logits = critics.outputs(frame, action)
    assert logits.shape == (3, 7, 4)
    expected = sum(return_ * logits.softmax(-1)[..., i] for i, return_ in enumerate((-1.0, 1.0, 3.0, 5.0)))
    torch.testing.assert_close(critics(frame, action), expected)


def test_plain_critics_keep_no_more_weights_than_before() -> None:
    names = [f"{kind}.{i}" for kind in ("weights", "biases") for i in range(3)]
    assert list(Critics(5).state_dict()) == names
    assert Critics(5).support is None


@pytest.mark.parametrize(
    ("n_atoms", "value_range"),
    [
        *((0, None), (5, None), (1, (0.0, 1.0)), (5, (1.0, 1.0)), (5, (0.0, math.inf)), (5, (0.0, 1.0, 2.0))),
        *((2.5, (0.0, 1.0)), ("abc", (0.0, 1.0)), (5, 5), (5, ("0", "1")), (5, "01")),  # of the command line
    ],
)
def test_returns_that_are_no_range_are_refused(n_atoms: Any, value_range: Any) -> None:
    with pytest.raises(ValueError, match="expected 1 and None, or 2 or more and two ascending numbers"):
        SoftActorCritic(3, LOW, HIGH, n_atoms=n_atoms, value_range=value_range)


@pytest.mark.parametrize(("low", "high"), [((-math.inf,), (1.0,)), ((1.0,), (1.0,)), ((0.0, 0.0), (1.0,))])
def test_actions_without_bounds_are_refused(low: tuple[float, ...], high: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="expected finite ones with low < high"):
        SoftActorCritic(3, low, high)


def test_a_number_is_no_bound_of_each_dimension() -> None:
    with pytest.raises(TypeError, match=r"low is -2.0 and high 2.0, expected sequences .* Write low=\(-2.0,\)"):
        SoftActorCritic(3, -2.0, 2.0)  # type: ignore[arg-type]
