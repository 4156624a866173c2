"""Losses of policy-gradient methods over padded batches.

``mask`` [B, T] float or bool is 1 on real steps, 0 on padding; a loss is the mean over the real steps. Without a mask
(None) the losses of all steps are returned, [B, T]. Targets and advantages are constants, and all tensors are on one
device. Flat minibatches, [N] instead of [B, T], are fine too: any shape, the same for all tensors of a call.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rlstruct.functional.checks import learnable, same_shape
from rlstruct.functional.statistics import masked_mean, masked_means


def policy_gradient_loss(log_probability: Tensor, advantage: Tensor, mask: Tensor | None) -> Tensor:
    """Compute the loss whose gradient is the policy gradient.

    Williams, "Simple statistical gradient-following algorithms for connectionist reinforcement learning" (1992),
    equation 6; with a learned baseline in the advantage, Sutton and Barto (2018), section 13.4.

    Args:
        log_probability: log pi(a_t | s_t) of the action taken.  [B, T] float, carries the gradient
        advantage: return minus baseline, G_t - v(s_t).          [B, T] float
        mask: see above.

    Returns:
        -mean of log pi(a_t | s_t) * advantage_t.  []

    >>> import torch
    >>> with torch.no_grad():
    ...     policy_gradient_loss(torch.tensor([[-1.0, -2.0]]), torch.tensor([[3.0, 1.0]]), torch.ones(1, 2))
    tensor(2.5000)
    """
    _check("policy_gradient_loss", mask, log_probability=log_probability, advantage=advantage)
    learnable("policy_gradient_loss", log_probability=log_probability)
    return _mean(log_probability * -advantage.detach(), mask)


def value_loss(value: Tensor, target: Tensor, mask: Tensor | None) -> Tensor:
    """Compute half the mean squared error of a learned baseline.

    Sutton and Barto (2018), equation 9.1, and the baseline's update of section 13.4, whose gradient this is.

    Args:
        value: v(s_t), carries the gradient.  [B, T] float
        target: the return to predict.        [B, T] float
        mask: see above.

    Returns:
        mean of (value - target)^2 / 2.  []

    >>> import torch
    >>> value_loss(torch.tensor([[1.0, 5.0]]), torch.tensor([[3.0, 0.0]]), torch.tensor([[1.0, 0.0]]))
    tensor(2.)
    """
    _check("value_loss", mask, value=value, target=target)
    return _mean((value - target.detach()).square() / 2, mask)


def entropy_loss(entropy: Tensor, mask: Tensor | None) -> Tensor:
    """Compute a loss that falls as the policy becomes more random.

    Williams and Peng, "Function optimization using connectionist reinforcement learning algorithms" (1991); Mnih et
    al., "Asynchronous methods for deep reinforcement learning" (ICML 2016), section 4.

    Args:
        entropy: entropy of the policy at each step, in nats.  [B, T] float, carries the gradient
        mask: see above.

    Returns:
        -mean of entropy.  []
    """
    _check("entropy_loss", mask, entropy=entropy)
    return _mean(-entropy, mask)


def clipped_surrogate_loss(ratio: Tensor, advantage: Tensor, mask: Tensor | None, clip: float) -> Tensor:
    """Compute PPO's policy loss, which does not reward moving an action's probability far from its old value.

    Schulman et al., "Proximal policy optimization algorithms" (2017), equation 7.

    Args:
        ratio: pi(a_t | s_t) / mu(a_t | s_t), where mu is the policy that acted.  [B, T] float, carries the gradient
        advantage: [B, T] float
        mask: see above.
        clip: epsilon, how far from 1 the ratio may move.

    Returns:
        -mean of min(ratio * advantage, clamp(ratio, 1 - clip, 1 + clip) * advantage).  []

    >>> import torch
    >>> ratio, advantage = torch.tensor([[2.0, 2.0]]), torch.tensor([[1.0, -1.0]])
    >>> with torch.no_grad():
    ...     clipped_surrogate_loss(ratio, advantage, torch.ones(1, 2), clip=0.25)
    tensor(0.3750)
    """
    _check("clipped_surrogate_loss", mask, ratio=ratio, advantage=advantage)
    learnable("clipped_surrogate_loss", ratio=ratio)
    cost = -advantage.detach()
    loss, bound = ratio * cost, ratio.detach().clamp(1.0 - clip, 1.0 + clip) * cost
    # Not torch.maximum, which would halve the gradient where both are equal.
    return _mean(torch.where(bound > loss, bound, loss), mask)


def clipped_value_loss(value: Tensor, target: Tensor, mask: Tensor | None, *, before: Tensor, clip: float) -> Tensor:
    """Compute half the mean squared error of a baseline, without rewarding moves far from its earlier values.

    As in OpenAI's implementation of PPO (Huang et al., "The 37 implementation details of PPO", 2022, detail 9).

    Args:
        value: v(s_t), carries the gradient.           [B, T] float
        target: the return to predict.                 [B, T] float
        mask: see above.
        before: v(s_t) before the update, a constant.  [B, T] float
        clip: how far from ``before`` the value may move, in units of the value.

    Returns:
        mean of max((value - target)^2, (clamped value - target)^2) / 2.  []
    """
    _check("clipped_value_loss", mask, value=value, target=target, before=before)
    constant, centre = target.detach(), before.detach()
    near = value.detach().clamp(centre - clip, centre + clip)
    loss, bound = (value - constant).square(), (near - constant).square()
    return _mean(torch.where(bound > loss, bound, loss) / 2, mask)  # see clipped_surrogate_loss


def actor_critic_terms(
    steps: Mapping[str, Tensor], mask: Tensor, *, value_coefficient: float, entropy_coefficient: float
) -> dict[str, Tensor]:
    """Average the losses of single steps: ``loss``, which is differentiated, and each of them, without gradients.

    Args:
        steps: ``policy_loss``, ``value_loss``, ``entropy_loss``, and anything else to average.  [B, T] float
        mask: the real steps.  [B, T] bool
        value_coefficient: weight of the critic's loss.
        entropy_coefficient: weight of the entropy.
    """
    loss = torch.add(steps["policy_loss"], steps["value_loss"], alpha=value_coefficient)
    if entropy_coefficient:
        loss = torch.add(loss, steps["entropy_loss"], alpha=entropy_coefficient)
    with torch.no_grad():
        means = masked_means(mask, *steps.values())
    return {"loss": masked_mean(loss, mask), **dict(zip(steps, means, strict=True))}


def _check(where: str, mask: Tensor | None, **tensors: Tensor) -> None:
    same_shape(where, temporal=False, **tensors, **({} if mask is None else {"mask": mask}))


def _mean(losses: Tensor, mask: Tensor | None) -> Tensor:
    return losses if mask is None else masked_mean(losses, mask)
