from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlstruct.errors import ShapeMismatchError
from rlstruct.functional.categorical import entropy, log_probability
from rlstruct.functional.policy_gradient import (
    actor_critic_terms,
    clipped_surrogate_loss,
    clipped_value_loss,
    entropy_loss,
    policy_gradient_loss,
    value_loss,
)
from rlstruct.functional.statistics import masked_mean, masked_means, whiten, whiten_each
from rlstruct.testing import forbid_host_sync

NAN = float("nan")
MASK = torch.tensor([[1.0, 1.0], [1.0, 0.0]])


def test_losses_by_hand_and_without_host_syncs(device: torch.device) -> None:
    mask = MASK.to(device)
    log_pi = torch.tensor([[-1.0, -2.0], [-3.0, NAN]], device=device)
    advantage = torch.tensor([[3.0, 0.5], [-1.0, NAN]], device=device)
    predicted = torch.tensor([[1.0, 2.0], [3.0, NAN]], device=device)
    target = torch.zeros(2, 2, device=device)
    spread = torch.tensor([[0.5, 0.25], [0.75, NAN]], device=device)
    with forbid_host_sync(), torch.no_grad():
        policy = policy_gradient_loss(log_pi, advantage, mask)
        value = value_loss(predicted, target, mask)
        randomness = entropy_loss(spread, mask)
    assert policy.item() == pytest.approx((3.0 + 1.0 - 3.0) / 3)
    assert value.item() == pytest.approx((1.0 + 4.0 + 9.0) / 3 / 2)
    assert randomness.item() == pytest.approx(-0.5)


@given(B=st.integers(1, 4), T=st.integers(1, 6), seed=st.integers(0, 10**6))
def test_losses_means_and_whitening_are_the_slow_loop_over_any_mask(B: int, T: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(B, T, generator=generator) < 0.7
    first, second = (torch.randn(B, T, generator=generator, dtype=torch.float64).where(mask, NAN) for _ in range(2))
    pairs = [(first[b, t].item(), second[b, t].item()) for b in range(B) for t in range(T) if mask[b, t]]
    n = max(1, len(pairs))
    close = {"abs": 1e-6, "rel": 1e-6}
    with torch.no_grad():
        policy = policy_gradient_loss(first, second, mask)
    assert policy.item() == pytest.approx(-sum(x * y for x, y in pairs) / n, **close)
    squares = sum((x - y) ** 2 for x, y in pairs)
    assert value_loss(first, second, mask).item() == pytest.approx(squares / n / 2, **close)
    mean = sum(x for x, _ in pairs) / n
    assert entropy_loss(first, mask.double()).item() == pytest.approx(-mean, **close)
    assert masked_mean(first, mask).item() == pytest.approx(mean, **close)
    deviation = math.sqrt(sum((x - mean) ** 2 for x, _ in pairs) / n)
    white = whiten(first, mask)
    expected = iter([(x - mean) / (deviation + 1e-8) for x, _ in pairs])
    for b in range(B):
        for t in range(T):
            assert white[b, t].item() == pytest.approx(next(expected) if mask[b, t] else 0.0, **close)
    for found, rows in zip(whiten_each([first, first[:1]], [mask, mask[:1]]), (slice(None), slice(1)), strict=True):
        assert torch.equal(found, whiten(first[rows], mask[rows]))


@given(seed=st.integers(0, 10**6))
def test_without_a_mask_a_loss_is_that_of_single_steps(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    first, second, third = (torch.rand(3, 4, generator=generator, dtype=torch.float64) + 0.5 for _ in range(3))
    mask = torch.rand(3, 4, generator=generator) < 0.7

    def losses(of: torch.Tensor | None) -> dict[str, torch.Tensor]:
        return {
            "policy_loss": policy_gradient_loss(first, second, of),
            "value_loss": value_loss(first, second, of),
            "entropy_loss": entropy_loss(first, of),
            "surrogate": clipped_surrogate_loss(first, second, of, 0.2),
            "clipped": clipped_value_loss(first, second, of, before=third, clip=0.2),
        }

    with torch.no_grad():
        steps, means = losses(None), losses(mask)
    found = actor_critic_terms(steps, mask, value_coefficient=0.5, entropy_coefficient=0.1)
    loss = means["policy_loss"] + 0.5 * means["value_loss"] + 0.1 * means["entropy_loss"]
    torch.testing.assert_close(found, {"loss": loss, **means})
    torch.testing.assert_close(masked_means(mask, first)[0], masked_mean(first, mask))


@given(seed=st.integers(0, 10**6))
def test_the_gradients_of_clipped_losses_are_those_of_minimum_and_maximum(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(40, generator=generator, dtype=torch.float64).mul(2).requires_grad_()
    y, z = (torch.randn(40, generator=generator, dtype=torch.float64) for _ in range(2))
    policy, value = clipped_surrogate_loss(x, y, None, 0.2).sum(), clipped_value_loss(x, y, None, before=z, clip=0.3)
    near = z + (x - z).clamp(-0.3, 0.3)
    expected_policy = -torch.minimum(x * y, x.clamp(0.8, 1.2) * y).sum()
    expected_value = torch.maximum((x - y).square(), (near - y).square()) / 2
    torch.testing.assert_close(policy, expected_policy)
    torch.testing.assert_close(value, expected_value)
    for found, expected in ((policy, expected_policy), (value.sum(), expected_value.sum())):
        torch.testing.assert_close(torch.autograd.grad(found, x), torch.autograd.grad(expected, x))


def test_the_gradient_of_the_policy_loss_is_the_policy_gradient() -> None:
    # d log pi(a) / d logits = one_hot(a) - pi, so the gradient is -(one_hot(a) - pi) * advantage: pi = (1/2, 1/2).
    logits = torch.zeros(1, 1, 2, requires_grad=True)
    log_pi = log_probability(logits, torch.tensor([[1]]))
    policy_gradient_loss(log_pi, torch.tensor([[4.0]]), torch.ones(1, 1)).backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[[2.0, -2.0]]]))


def test_no_gradient_reaches_advantage_or_target_and_none_of_the_padding() -> None:
    log_pi = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    value = torch.tensor([[1.0, 2.0]], requires_grad=True)
    mask = torch.tensor([[True, False]])
    (policy_gradient_loss(log_pi, 3.0 - value, mask) + value_loss(value, value + 1.0, mask)).backward()
    torch.testing.assert_close(log_pi.grad, torch.tensor([[-2.0, 0.0]]))  # -(3 - 1), and nothing on padding
    torch.testing.assert_close(value.grad, torch.tensor([[-1.0, 0.0]]))  # 1 - 2: the target is a constant


def test_collected_numbers_that_carry_no_gradient_are_refused() -> None:
    collected, ones = torch.zeros(1, 2), torch.ones(1, 2)
    with pytest.raises(RuntimeError, match=r"policy_gradient_loss: log_probability carries no .*replay_agent"):
        policy_gradient_loss(collected, ones, ones)
    with pytest.raises(RuntimeError, match=r"clipped_surrogate_loss: ratio carries no .*replay_agent"):
        clipped_surrogate_loss(collected, ones, ones, clip=0.2)


@pytest.mark.parametrize("loss", [policy_gradient_loss, value_loss])
def test_shapes_that_would_broadcast_are_refused(loss: object) -> None:
    with pytest.raises(ShapeMismatchError, match=r"is \[2, 3\], expected .* is \[2, 3, 1\]"):
        loss(torch.ones(2, 3, 1), torch.ones(2, 3), torch.ones(2, 3))  # type: ignore[operator]


def test_categorical_by_hand() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)], [5.0, 5.0]])  # probabilities 1/4 and 3/4; 1/2 and 1/2
    expected = torch.tensor([math.log(0.75), math.log(0.5)])
    torch.testing.assert_close(log_probability(logits, torch.tensor([1, 0])), expected)
    in_bits = torch.tensor([2 / 4 + 0.75 * math.log2(4 / 3), 1.0])
    torch.testing.assert_close(entropy(logits), in_bits * math.log(2))


@given(A=st.integers(1, 6), seed=st.integers(0, 10**6))
def test_categorical_agrees_with_torch(A: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(4, 3, A, generator=generator, dtype=torch.float64)
    action = torch.randint(A, (4, 3), generator=generator)
    oracle = torch.distributions.Categorical(logits=logits)
    torch.testing.assert_close(log_probability(logits, action), oracle.log_prob(action))
    torch.testing.assert_close(entropy(logits), oracle.entropy())


def test_impossible_actions_leave_entropy_and_its_gradient_finite() -> None:
    logits = torch.tensor([[0.0, 0.0, -torch.inf]], requires_grad=True)
    result = entropy(logits)
    result.sum().backward()
    assert result.item() == pytest.approx(math.log(2))
    torch.testing.assert_close(logits.grad, torch.zeros(1, 3))


def test_masked_mean_of_nothing_is_zero() -> None:
    assert masked_mean(torch.tensor([NAN, NAN]), torch.zeros(2)).item() == 0.0


def test_whitened_values_have_mean_0_and_variance_1_on_real_steps_only() -> None:
    values = torch.tensor([[1.0, 2.0, NAN], [6.0, NAN, NAN]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    out = whiten(values, mask)
    # mean 3, deviations -2, -1, 3: variance (4 + 1 + 9) / 3 = 14 / 3
    std = math.sqrt(14 / 3)
    expected = torch.tensor([[-2 / std, -1 / std, 0.0], [3 / std, 0.0, 0.0]])
    torch.testing.assert_close(out, expected)


def test_whitening_equal_values_gives_zero() -> None:
    torch.testing.assert_close(whiten(torch.full((2, 2), 5.0), torch.ones(2, 2)), torch.zeros(2, 2))
