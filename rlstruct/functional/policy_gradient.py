"""Losses of policy-gradient methods over padded batches."""

from __future__ import annotations

import torch
from torch import Tensor

from rlstruct.functional._checks import learnable, same_shape
from rlstruct.functional.statistics import masked_mean


def policy_gradient_loss(log_probability: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    """Loss whose gradient is the policy gradient.

    Williams, "Simple statistical gradient-following algorithms for connectionist reinforcement learning" (1992),
    equation 6; with a learned baseline in the advantage, Sutton and Barto (2018), section 13.4.

    Args:
        log_probability: log pi(a_t | s_t) of the action taken.         [B, T] float, carries the gradient
        advantage: return minus baseline, G_t - v(s_t); a constant.     [B, T] float, same device
        mask: 1 on real steps, 0 on padding.                            [B, T] float or bool

    Returns:
        -mean over real steps of log pi(a_t | s_t) * advantage_t.  []

    Raises:
        ShapeMismatchError: the shapes differ.
        RuntimeError: gradients are on, and none would reach the agent.

    >>> import torch
    >>> with torch.no_grad():
    ...     policy_gradient_loss(torch.tensor([[-1.0, -2.0]]), torch.tensor([[3.0, 1.0]]), torch.ones(1, 2))
    tensor(2.5000)
    """
    same_shape("policy_gradient_loss", log_probability=log_probability, advantage=advantage, mask=mask)
    learnable("policy_gradient_loss", log_probability=log_probability)
    return -masked_mean(log_probability * advantage.detach(), mask)


def value_loss(value: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """Half the mean squared error of a learned baseline.

    Sutton and Barto (2018), equation 9.1, and the baseline's update of section 13.4, whose gradient this is.

    Args:
        value: v(s_t), carries the gradient.               [B, T] float
        target: the return that it should predict; a constant.  [B, T] float, same device
        mask: 1 on real steps, 0 on padding.               [B, T] float or bool

    Returns:
        mean over real steps of (value - target)^2 / 2.  []

    Raises:
        ShapeMismatchError: the shapes differ.

    >>> import torch
    >>> value_loss(torch.tensor([[1.0, 5.0]]), torch.tensor([[3.0, 0.0]]), torch.tensor([[1.0, 0.0]]))
    tensor(2.)
    """
    same_shape("value_loss", value=value, target=target, mask=mask)
    return masked_mean((value - target.detach()).square(), mask) / 2


def entropy_loss(entropy: Tensor, mask: Tensor) -> Tensor:
    """Loss that falls as the policy becomes more random.

    Williams and Peng, "Function optimization using connectionist reinforcement learning algorithms" (1991); Mnih et
    al., "Asynchronous methods for deep reinforcement learning" (ICML 2016), section 4.

    Args:
        entropy: entropy of the policy at each step, in nats.  [B, T] float, carries the gradient
        mask: 1 on real steps, 0 on padding.                   [B, T] float or bool, same device

    Returns:
        -mean over real steps of entropy.  []

    Raises:
        ShapeMismatchError: the shapes differ.
    """
    same_shape("entropy_loss", entropy=entropy, mask=mask)
    return -masked_mean(entropy, mask)


def clipped_surrogate_loss(ratio: Tensor, advantage: Tensor, mask: Tensor, clip: float) -> Tensor:
    """Loss of PPO's policy, which gains nothing from moving the probability of an action far away.

    Schulman et al., "Proximal policy optimization algorithms" (2017), equation 7.

    Args:
        ratio: pi(a_t | s_t) / mu(a_t | s_t), mu being the policy that acted.  [B, T] float, carries the gradient
        advantage: a constant.                                                 [B, T] float, same device
        mask: 1 on real steps, 0 on padding.                                   [B, T] float or bool
        clip: epsilon, how far from 1 the ratio may move.

    Returns:
        -mean over real steps of min(ratio * advantage, clamp(ratio, 1 - clip, 1 + clip) * advantage).  []

    Raises:
        ShapeMismatchError: the shapes differ.
        RuntimeError: gradients are on, and none would reach the agent.

    >>> import torch
    >>> ratio, advantage = torch.tensor([[2.0, 2.0]]), torch.tensor([[1.0, -1.0]])
    >>> with torch.no_grad():
    ...     clipped_surrogate_loss(ratio, advantage, torch.ones(1, 2), clip=0.25)
    tensor(0.3750)
    """
    same_shape("clipped_surrogate_loss", ratio=ratio, advantage=advantage, mask=mask)
    learnable("clipped_surrogate_loss", ratio=ratio)
    constant = advantage.detach()
    return -masked_mean(torch.minimum(ratio * constant, ratio.clamp(1.0 - clip, 1.0 + clip) * constant), mask)


def clipped_value_loss(value: Tensor, target: Tensor, mask: Tensor, *, before: Tensor, clip: float) -> Tensor:
    """Half the mean squared error of a baseline that gains nothing from moving far away from what it said before.

    As in OpenAI's implementation of PPO (Huang et al., "The 37 implementation details of PPO", 2022, detail 9).

    Args:
        value: v(s_t), carries the gradient.                        [B, T] float
        target: the return that it should predict; a constant.      [B, T] float, same device
        mask: 1 on real steps, 0 on padding.                        [B, T] float or bool
        before: v(s_t) before the update; a constant.               [B, T] float
        clip: how far from ``before`` the value may move, in units of the value.

    Returns:
        mean over real steps of max((value - target)^2, (clamped value - target)^2) / 2.  []

    Raises:
        ShapeMismatchError: the shapes differ.
    """
    same_shape("clipped_value_loss", value=value, target=target, mask=mask, before=before)
    constant, near = target.detach(), before.detach() + (value - before.detach()).clamp(-clip, clip)
    return masked_mean(torch.maximum((value - constant).square(), (near - constant).square()), mask) / 2
