"""Discounted returns over padded batches."""

from __future__ import annotations

import torch
from torch import Tensor

from rlstruct.functional.checks import axes, fractions, same_shape
from rlstruct.functional.scan import backward_recurrence


def reward_to_go(reward: Tensor, mask: Tensor, discount: float) -> Tensor:
    """Sum the discounted future rewards at every real step of rows that hold one episode each.

    The Monte-Carlo return, Sutton and Barto, "Reinforcement Learning" (2018), equation 3.8.

    Args:
        reward: reward received after acting at t.  [B, T] float
        mask: 1 on real steps, 0 on padding.        [B, T] float or bool, same device
        discount: per-step factor in [0, 1].

    Returns:
        G[b, t] = mask[b, t] * (r[b, t] + discount * G[b, t + 1]).  [B, T], dtype and device of reward

    >>> reward_to_go(torch.ones(1, 3), torch.tensor([[1.0, 1.0, 0.0]]), 0.5)
    tensor([[1.5000, 1.0000, 0.0000]])
    """
    fractions("reward_to_go", discount=discount)
    same_shape("reward_to_go", temporal=True, reward=reward, mask=mask)
    real = mask.bool()
    factor = real.to(reward.dtype) * discount
    return backward_recurrence(reward.masked_fill(~real, 0.0), factor)


def episode_ends(done: Tensor, mask: Tensor) -> Tensor:
    """Mark the last step of each episode, and the last real step of the row.

    Args:
        done: the observation after step t ended its episode.  [B, T] bool
        mask: 1 on real steps, 0 on padding, which is at the end of a row.  [B, T] float or bool, same device

    Returns:
        [B, T] bool; False on padding.

    >>> episode_ends(torch.tensor([[True, False, False]]), torch.tensor([[True, True, False]]))
    tensor([[ True,  True, False]])
    """
    same_shape("episode_ends", temporal=True, done=done, mask=mask)
    real = mask.bool()
    # 0 after the last column. Not a bool: torch 2.13 compiles a padded mask to C++ that no compiler takes.
    follows = torch.nn.functional.pad(real[:, 1:].to(torch.float32), (0, 1))
    return real & (done.bool() | (follows == 0.0))


def discounted_sum(reward: Tensor, done: Tensor, mask: Tensor, discount: float, before: Tensor | None) -> Tensor:
    """Sum the discounted past rewards of an episode, up to and including each step.

    Args:
        reward: reward received after acting at t.                 [B, T] float
        done: the observation after t ended its episode.           [B, T] bool, same device
        mask: 1 on real steps, 0 on padding.                       [B, T] float or bool
        discount: per-step factor in [0, 1].
        before: the sums of the episodes that the first step continues, up to the step before; None for 0.  [B]

    Returns:
        S[b, t] = r[b, t] + discount * S[b, t - 1], without the second term where an episode begins; S does not change
        on padding.  [B, T], dtype and device of reward

    >>> done = torch.tensor([[False, True, False]])
    >>> discounted_sum(torch.ones(1, 3), done, torch.ones(1, 3), 0.5, torch.tensor([4.0]))
    tensor([[3.0000, 2.5000, 1.0000]])
    """
    fractions("discounted_sum", discount=discount)
    same_shape("discounted_sum", temporal=True, reward=reward, done=done, mask=mask)
    real = mask.bool()
    addend = torch.where(real, reward, 0.0)
    decay = torch.ones_like(reward).masked_fill(real, discount)
    if before is not None:
        axes("discounted_sum", reward=(reward, "B T"), before=(before, "B"))
        addend = torch.cat([addend[:, :1] + decay[:, :1] * before.unsqueeze(1), addend[:, 1:]], dim=1)
    goes_on = torch.nn.functional.pad(~done.bool()[:, :-1], (1, 0))  # False before the first column
    return backward_recurrence(addend.flip(1), (goes_on * decay).flip(1)).flip(1)


def bootstrapped_return(
    reward: Tensor, terminated: Tensor, done: Tensor, mask: Tensor, *, next_value: Tensor, discount: float
) -> Tensor:
    """Sum the discounted future rewards, and estimate the rest where the data stops.

    Rows may hold several episodes, whole or not; `rlstruct.functional.advantages` explains how each is continued
    (Pardo et al., "Time limits in reinforcement learning", ICML 2018, equation 6).

    Args:
        reward: reward received after acting at t.               [B, T] float
        terminated: the observation after t is terminal.         [B, T] bool, same device
        done: the observation after t ended its episode, by termination or truncation.  [B, T] bool
        mask: 1 on real steps, 0 on padding.                     [B, T] float or bool
        next_value: value of the true observation after t, before any restart; read only where the data stops without
            termination, and taken as a constant.                [B, T] float
        discount: per-step factor in [0, 1].

    Returns:
        G[b, t] = r[b, t] + discount * N, where N is 0 if terminated, next_value[b, t] if truncated or at the row's last
        real step, else G[b, t + 1]; 0 on padding.  [B, T], dtype and device of reward
    """
    where = "bootstrapped_return"
    fractions(where, discount=discount)
    same_shape(where, temporal=True, reward=reward, terminated=terminated, done=done, mask=mask, next_value=next_value)
    real = mask.bool()
    end = episode_ends(done, mask)
    bootstrap = torch.where(end & ~terminated.bool(), next_value.detach().to(reward.dtype), 0.0)
    addend = torch.where(real, reward + discount * bootstrap, 0.0)
    factor = (real & ~end).to(reward.dtype) * discount
    return backward_recurrence(addend, factor)
