from __future__ import annotations

import math

import torch
from torch.distributions import Independent, Normal, TransformedDistribution
from torch.distributions.transforms import TanhTransform

from rlstruct.functional import gaussian, squashed
from rlstruct.functional.random import step_keys
from rlstruct.testing import forbid_host_sync


def keys_for(n: int, device: torch.device | str = "cpu") -> torch.Tensor:
    return step_keys(torch.arange(n, device=device), 0, torch.arange(1, device=device))[0]


def test_the_density_is_that_of_torchs_own_distribution_and_never_syncs(device: torch.device) -> None:
    mean, log_std = 0.5 * torch.randn(2, 50, 3, dtype=torch.float64)
    here, spread, key = mean.to(device), log_std.to(device), keys_for(50, device)
    with forbid_host_sync():
        drawn, found = squashed.sample_with_log_probability(here, spread, key)
    oracle = TransformedDistribution(Independent(Normal(mean, log_std.exp()), 1), [TanhTransform()])
    torch.testing.assert_close(found.cpu(), oracle.log_prob(drawn.cpu()), rtol=1e-5, atol=1e-5)


def test_the_correction_by_hand_and_far_out_where_tanh_is_1() -> None:
    # tanh'(0) = 1, and tanh'(atanh(1/2)) = 1 - 1/4; far out 1 - tanh^2 is 4 exp(-2 |x|).
    x = torch.tensor([0.0, 0.5 * math.log(3.0), 40.0, -40.0])
    expected = torch.tensor([0.0, math.log(0.75), math.log(4.0) - 80.0, math.log(4.0) - 80.0])
    torch.testing.assert_close(squashed.log_slope(x), expected)
    assert torch.tanh(x[2]) == 1.0


def test_gradients_flow_through_the_draw() -> None:
    mean, log_std = (torch.randn(6, 2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    key = keys_for(6)
    noise = gaussian.sample(torch.zeros(6, 2, dtype=torch.float64), torch.zeros(2), key)
    drawn, found = squashed.sample_with_log_probability(mean, log_std, key)
    ours = torch.autograd.grad((drawn.sum(-1) + found).sum(), (mean, log_std))
    x = mean + log_std.exp() * noise  # by hand: log N = -e^2 / 2 - log sigma - log(2 pi) / 2
    density = (-0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi) - (1 - torch.tanh(x) ** 2).log()).sum(-1)
    theirs = torch.autograd.grad((torch.tanh(x).sum(-1) + density).sum(), (mean, log_std))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)
