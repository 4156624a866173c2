from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlstruct.errors import ShapeMismatchError
from rlstruct.functional.returns import bootstrapped_return, episode_ends, reward_to_go
from rlstruct.functional.scan import backward_recurrence
from rlstruct.testing import forbid_host_sync

NAN = float("nan")


def test_reward_to_go_ignores_padding_and_never_syncs(device: torch.device) -> None:
    reward = torch.tensor([[1.0, 2.0, 4.0], [1.0, 9.0, 9.0]], device=device)
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]], device=device)
    with forbid_host_sync():
        out = reward_to_go(reward, mask, discount=0.5)
    # Row 0: 4; 2 + 4/2 = 4; 1 + 4/2 = 3.  Row 1 ends after one step: the padded 9s must not leak in.
    torch.testing.assert_close(out, torch.tensor([[3.0, 4.0, 4.0], [1.0, 0.0, 0.0]], device=device))


def test_what_stands_on_padding_has_no_effect_even_nan() -> None:
    reward = torch.tensor([[1.0, 2.0, NAN]])
    mask = torch.tensor([[True, True, False]])
    torch.testing.assert_close(reward_to_go(reward, mask, 0.5), torch.tensor([[2.0, 2.0, 0.0]]))
    poisoned = torch.full((1, 3), NAN)
    poisoned[0, 1] = 10.0
    never = torch.zeros(1, 3, dtype=torch.bool)
    out = bootstrapped_return(reward, never, never, mask, next_value=poisoned, discount=0.5)
    # The row stops unfinished after step 1: 2 + 10/2 = 7; 1 + 7/2 = 4.5. next_value elsewhere is not read.
    torch.testing.assert_close(out, torch.tensor([[4.5, 7.0, 0.0]]))


def test_a_terminated_episode_is_worth_nothing_beyond_and_a_truncated_one_its_value() -> None:
    reward = torch.ones(3, 2)
    terminated = torch.tensor([[False, True], [False, False], [False, False]])
    done = torch.tensor([[False, True], [False, True], [False, False]])
    mask = torch.ones(3, 2)
    value = torch.tensor([[NAN, 8.0], [NAN, 8.0], [NAN, 8.0]])
    out = bootstrapped_return(reward, terminated, done, mask, next_value=value, discount=0.5)
    # Terminated: 1; 1 + 1/2.  Truncated: 1 + 8/2 = 5; 1 + 5/2 = 3.5.  Unfinished: as truncated.
    torch.testing.assert_close(out, torch.tensor([[1.5, 1.0], [3.5, 5.0], [3.5, 5.0]]))


def test_episodes_within_one_row_do_not_mix() -> None:
    reward = torch.tensor([[1.0, 2.0, 4.0, 8.0]])
    terminated = torch.tensor([[False, False, True, False]])
    done = torch.tensor([[True, False, True, False]])
    value = torch.tensor([[16.0, NAN, 16.0, 16.0]])
    out = bootstrapped_return(reward, terminated, done, torch.ones(1, 4), next_value=value, discount=0.5)
    # t=3 unfinished: 8 + 16/2 = 16.  t=2 terminated: 4.  t=1: 2 + 4/2 = 4.  t=0 truncated: 1 + 16/2 = 9.
    torch.testing.assert_close(out, torch.tensor([[9.0, 4.0, 4.0, 16.0]]))


def test_the_bootstrap_is_a_constant() -> None:
    value = torch.ones(1, 1, requires_grad=True)
    no = torch.zeros(1, 1, dtype=torch.bool)
    out = bootstrapped_return(torch.ones(1, 1), no, no, torch.ones(1, 1), next_value=value, discount=0.9)
    assert not out.requires_grad


def slow_return(
    reward: Tensor, terminated: Tensor, done: Tensor, lengths: Tensor, value: Tensor, discount: float
) -> Tensor:
    """Step by step backwards, in Python floats, as the definition says."""
    out = torch.zeros_like(reward)
    for b in range(reward.shape[0]):
        length = int(lengths[b])
        following = 0.0
        for t in reversed(range(length)):
            if terminated[b, t]:
                following = 0.0
            elif done[b, t] or t == length - 1:
                following = float(value[b, t])
            following = float(reward[b, t]) + discount * following
            out[b, t] = following
    return out


@given(
    B=st.integers(1, 4),
    T=st.integers(1, 20),
    seed=st.integers(0, 10**6),
    discount=st.sampled_from([0.0, 0.5, 0.99, 1.0]),
)
def test_any_masks_agree_with_the_slow_loop(B: int, T: int, seed: int, discount: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    reward = torch.randn(B, T, generator=generator, dtype=torch.float64)
    value = torch.randn(B, T, generator=generator, dtype=torch.float64)
    terminated = torch.rand(B, T, generator=generator) < 0.2
    done = terminated | (torch.rand(B, T, generator=generator) < 0.2)
    lengths = torch.randint(0, T + 1, (B,), generator=generator)
    mask = torch.arange(T) < lengths.unsqueeze(1)
    padded = reward.masked_fill(~mask, NAN), value.masked_fill(~mask, NAN)
    out = bootstrapped_return(padded[0], terminated, done, mask, next_value=padded[1], discount=discount)
    torch.testing.assert_close(out, slow_return(reward, terminated, done, lengths, value, discount))
    ends = [[t < n and (done[b, t].item() or t == n - 1) for t in range(T)] for b, n in enumerate(lengths.tolist())]
    assert episode_ends(done, mask).tolist() == ends
    never = torch.zeros_like(done)
    whole = slow_return(reward, never, never, lengths, torch.zeros_like(value), discount)
    torch.testing.assert_close(reward_to_go(padded[0], mask.double(), discount), whole)


@given(T=st.integers(1, 40), seed=st.integers(0, 10**6))
def test_the_recurrence_agrees_with_its_definition(T: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    addend = torch.randn(2, T, generator=generator, dtype=torch.float64)
    factor = torch.randn(2, T, generator=generator, dtype=torch.float64)
    x = backward_recurrence(addend, factor)
    following = torch.cat([x[:, 1:], torch.zeros(2, 1, dtype=torch.float64)], dim=1)
    torch.testing.assert_close(x, addend + factor * following)


def test_five_hundred_float32_steps_keep_six_digits() -> None:
    out = reward_to_go(torch.ones(1, 500), torch.ones(1, 500), 0.99)
    exact = torch.tensor([(1 - 0.99**n) / (1 - 0.99) for n in range(500, 0, -1)], dtype=torch.float64)
    torch.testing.assert_close(out[0].double(), exact, rtol=1e-5, atol=0.0)


def test_gradients_flow_through_rewards() -> None:
    reward = torch.ones(1, 3, requires_grad=True)
    reward_to_go(reward, torch.ones(1, 3), 0.5)[0, 0].backward()
    torch.testing.assert_close(reward.grad, torch.tensor([[1.0, 0.5, 0.25]]))


def test_ends_are_done_steps_and_the_last_real_one() -> None:
    done = torch.tensor([[False, True, False, True], [False, False, False, True]])
    mask = torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 0.0, 0.0]])
    expected = torch.tensor([[False, True, False, True], [False, True, False, False]])
    torch.testing.assert_close(episode_ends(done, mask), expected)


def test_wrong_shapes_are_named() -> None:
    with pytest.raises(ShapeMismatchError, match=r"reward_to_go: mask is \[2, 4\], expected .* reward is \[2, 3\]"):
        reward_to_go(torch.ones(2, 3), torch.ones(2, 4), 0.9)
    no = torch.zeros(2, 3, dtype=torch.bool)
    with pytest.raises(ShapeMismatchError, match=r"next_value is \[2, 3, 1\]"):
        bootstrapped_return(torch.ones(2, 3), no, no, no, next_value=torch.ones(2, 3, 1), discount=0.9)


def test_wrong_discounts_are_named() -> None:
    with pytest.raises(ValueError, match=r"reward_to_go: discount is 1.5, expected 0 to 1"):
        reward_to_go(torch.ones(1, 1), torch.ones(1, 1), 1.5)
