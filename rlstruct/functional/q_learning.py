"""Targets and losses of Q-learning over batches of transitions."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import huber_loss

from rlstruct.functional.checks import axes, same_shape


def n_step_reward(reward: Tensor, real: Tensor, discount: float) -> tuple[Tensor, Tensor]:
    """Sum the discounted rewards of up to n successive steps of one episode.

    The first part of the n-step return, Sutton and Barto, "Reinforcement Learning" (2018), equation 7.1. The rest is
    ``discount^m`` times the value of the state after the last of the m steps.

    Args:
        reward: rewards of n steps in a row; those from the first step that is not real on are not read.  [B, n] float
        real: True for steps of the first step's episode; always True for the first step.                 [B, n] bool
        discount: per-step factor in [-1, 1]; negative for two players who take turns in a zero-sum game.

    Returns:
        ``(partial, m)``: m[b] is the number of steps before the first False in real[b], and partial[b] is the sum over
        i < m of discount^i * reward[b, i].  [B] dtype of reward, [B] int64

    >>> n_step_reward(torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[True, True, False]]), 0.5)
    (tensor([2.]), tensor([2]))
    """
    axes("n_step_reward", reward=(reward, "B n"), real=(real, "B n"))
    leading = real.to(torch.int64).cumprod(dim=1).bool()  # [B, n]
    power = torch.arange(reward.shape[1], device=reward.device, dtype=reward.dtype)
    partial = torch.where(leading, reward * discount**power, 0.0).sum(dim=1)
    return partial, leading.sum(dim=1)


def chosen_value(values: Tensor, action: Tensor) -> Tensor:
    """Return the values of the actions taken.

    Args:
        values: Q(s, a).                      [..., A] float
        action: index of the action taken; an index out of range has no meaning on an accelerator, where it would end
            all work before the batcher can report it.  [...] int64, same device

    Returns:
        Q(s, action).  [...]

    >>> chosen_value(torch.tensor([[1.0, 3.0], [5.0, 7.0]]), torch.tensor([1, 0]))
    tensor([3., 5.])
    """
    if not action.is_cpu:
        action = action.clamp(0, values.shape[-1] - 1)
    return values.gather(-1, action.unsqueeze(-1)).squeeze(-1)


def double_q_value(online_values: Tensor, target_values: Tensor) -> Tensor:
    """Return one network's value of the action that another network prefers.

    van Hasselt, Guez and Silver, "Deep reinforcement learning with double Q-learning" (AAAI 2016), equation 4: choosing
    and evaluating by the same numbers would mistake noise for value.

    Args:
        online_values: Q(s, a) of the learning network, which chooses.  [..., A] float
        target_values: Q'(s, a) of the target network, which evaluates. [..., A] float, same device

    Returns:
        Q'(s, argmax_a Q(s, a)).  [...]

    >>> double_q_value(torch.tensor([[1.0, 3.0]]), torch.tensor([[7.0, 5.0]]))
    tensor([5.])
    """
    axes("double_q_value", online_values=(online_values, "... A"), target_values=(target_values, "... A"))
    return target_values.gather(-1, online_values.argmax(dim=-1, keepdim=True)).squeeze(-1)


def td_target(reward: Tensor, discount: Tensor, terminated: Tensor, next_value: Tensor) -> Tensor:
    """Return the target of an action value: the reward plus the discounted value of the next state.

    Mnih et al., "Human-level control through deep reinforcement learning" (Nature, 2015), algorithm 1. The value after
    a termination is 0; the value after a truncation is that of the true last observation (Pardo et al., "Time limits
    in reinforcement learning", ICML 2018).

    Args:
        reward: reward of one step, or of m steps, see `n_step_reward`.  [...] float
        discount: factor of the next state's value, discount^m.  [...] float, same shape and device
        terminated: the next state is terminal.  [...] bool, same shape
        next_value: value of the next state, see `double_q_value`; not read where terminated.  [...] float, same shape

    Returns:
        reward + discount * (1 - terminated) * next_value, without gradient.  [...]

    >>> td_target(torch.ones(2), torch.full((2,), 0.5), torch.tensor([True, False]), torch.full((2,), 8.0))
    tensor([1., 5.])
    """
    same_shape("td_target", reward=reward, discount=discount, terminated=terminated, next_value=next_value)
    return (reward + torch.where(terminated.bool(), 0.0, discount * next_value)).detach()


def project_distribution(values: Tensor, probabilities: Tensor, support: Tensor) -> Tensor:
    """Move the probabilities of any values to those of a support, keeping the mean of all within its range.

    Bellemare, Dabney and Munos, "A distributional perspective on reinforcement learning" (ICML 2017), algorithm 1: each
    value shares its probability among its two neighbours in the support, in proportion to its closeness. Values beyond
    the support count as its nearest end. On accelerators, a fixed order of all sums takes M times the memory of
    ``values``.

    Args:
        values: see `td_target`, of each return of the support.  [..., M] float
        probabilities: of the values; they sum to 1.              [..., M] float, same shape and device
        support: at least two numbers, ascending, at equal distances.  [M] float, same device

    Returns:
        Probabilities of the numbers of the support.  [..., M]

    >>> project_distribution(torch.tensor([[0.5, 9.0]]), torch.tensor([[0.8, 0.2]]), torch.tensor([0.0, 2.0]))
    tensor([[0.6000, 0.4000]])
    """
    same_shape("project_distribution", values=values, probabilities=probabilities)
    axes("project_distribution", values=(values, "... M"), support=(support, "M"))
    M, low, high = len(support), support[0], support[-1]
    place = ((values.clamp(low, high) - low) * ((M - 1) / (high - low))).clamp(0.0, M - 1)  # [..., M], 0 to M - 1
    if not place.is_cpu:  # where adding to the same number from many threads has no order
        number = torch.arange(M, device=place.device, dtype=place.dtype).unsqueeze(-1)
        share = (1.0 - (place.unsqueeze(-2) - number).abs()).clamp(min=0.0)  # [..., M, M]
        return (share * probabilities.unsqueeze(-2)).sum(-1)
    lower = place.floor().clamp(max=M - 2)
    share, index = place - lower, lower.to(torch.int64)  # the upper neighbour's share
    projected = torch.zeros_like(probabilities)
    projected = projected.scatter_add(-1, index, probabilities * (1.0 - share))
    return projected.scatter_add(-1, index + 1, probabilities * share)


def q_loss(value: Tensor, target: Tensor, weight: Tensor, delta: float = 1.0) -> Tensor:
    """Compute the weighted mean Huber loss of action values, whose gradient is the error clipped to [-delta, delta].

    Schaul, Quan, Antonoglou and Silver, "Prioritized experience replay" (ICLR 2016), algorithm 1: the weights undo the
    bias of a replay that prefers some transitions.

    Args:
        value: Q(s, a) of the action taken, carries the gradient.  [...] float
        target: see `td_target`; a constant.                       [...] float, same shape and device
        weight: importance of each transition; ones for uniform replay.  [...] float, same shape
        delta: errors above this size count linearly.

    Returns:
        mean of weight * huber(value - target).  []

    >>> q_loss(torch.tensor([1.0, 4.0]), torch.tensor([1.5, 1.0]), torch.tensor([2.0, 0.5]))
    tensor(0.7500)
    """
    same_shape("q_loss", value=value, target=target, weight=weight)
    return (weight * huber_loss(value, target.detach(), reduction="none", delta=delta)).mean()


def duelling_values(value: Tensor, advantage: Tensor) -> Tensor:
    """Combine the value of a state and the advantage of each action into action values.

    Wang et al., "Dueling network architectures for deep reinforcement learning" (ICML 2016), equation 9.

    Args:
        value: V(s).                              [..., 1] float
        advantage: A(s, a), up to a constant.     [..., A] float, same device

    Returns:
        V(s) + A(s, a) - mean over a' of A(s, a').  [..., A]

    >>> duelling_values(torch.tensor([[5.0]]), torch.tensor([[1.0, 3.0]]))
    tensor([[4., 6.]])
    """
    # Networks call this, and torch.jit.trace makes tensors of sizes: compare only where they are numbers.
    if not value.shape or isinstance(value.shape[0], int):
        axes("duelling_values", value=(value, "... 1"), advantage=(advantage, "... A"))
    return value + advantage - advantage.mean(dim=-1, keepdim=True)
