from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from rlstruct.functional import gaussian
from rlstruct.functional.random import step_keys
from rlstruct.testing import forbid_host_sync


def test_density_and_entropy_by_hand_never_sync(device: torch.device) -> None:
    mean = torch.tensor([[1.0, 0.0]], device=device)
    log_std = torch.tensor([[math.log(2.0), 0.0]], device=device)
    action = torch.tensor([[5.0, 1.0]], device=device)
    with forbid_host_sync():
        density = gaussian.log_probability(mean, log_std, action)
        entropy = gaussian.entropy(log_std)
    # Two and one standard deviations off: -(4 + 1) / 2 - log 2 - log(2 pi).
    expected = torch.tensor([-2.5 - math.log(2.0) - math.log(2.0 * math.pi)], device=device)
    torch.testing.assert_close(density, expected)
    # log 2 for the wider axis, and for each axis (1 + log(2 pi)) / 2.
    torch.testing.assert_close(entropy, torch.tensor([math.log(2.0) + 1.0 + math.log(2.0 * math.pi)], device=device))


@given(B=st.integers(1, 5), D=st.integers(1, 4), seed=st.integers(0, 10**6))
def test_they_agree_with_torchs_own_distribution(B: int, D: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    mean, log_std, action = torch.randn(3, B, D, generator=generator, dtype=torch.float64)
    oracle = torch.distributions.Normal(mean, log_std.exp())
    density = gaussian.log_probability(mean, log_std, action)
    torch.testing.assert_close(density, oracle.log_prob(action).sum(-1), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gaussian.entropy(log_std), oracle.entropy().sum(-1), rtol=1e-6, atol=1e-6)


def test_the_gradient_of_the_density_is_that_of_torchs_own() -> None:
    mean, log_std = (torch.randn(4, 2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    action = torch.randn(4, 2, dtype=torch.float64)
    ours = torch.autograd.grad(gaussian.log_probability(mean, log_std, action).sum(), (mean, log_std))
    oracle = torch.distributions.Normal(mean, log_std.exp()).log_prob(action).sum()
    for mine, theirs in zip(ours, torch.autograd.grad(oracle, (mean, log_std)), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_samples_have_the_mean_and_the_deviation_and_follow_the_key(device: torch.device) -> None:
    B = 20_000
    key = step_keys(torch.arange(B, device=device), 0, torch.arange(1, device=device))[0]
    mean = torch.tensor([1.0, -2.0], device=device).expand(B, 2)
    log_std = torch.tensor([0.0, math.log(3.0)], device=device)
    with forbid_host_sync():
        drawn = gaussian.sample(mean, log_std, key)
    torch.testing.assert_close(drawn.mean(0), mean[0], rtol=0, atol=0.08)
    torch.testing.assert_close(drawn.std(0), torch.tensor([1.0, 3.0], device=device), rtol=0.03, atol=0)
    assert abs(torch.corrcoef(drawn.T)[0, 1].item()) < 0.03
    assert torch.equal(drawn[5:6], gaussian.sample(mean[5:6], log_std, key[5:6]))
