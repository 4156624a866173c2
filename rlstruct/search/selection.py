"""Choice of the action to try next, and the final recommendation. Pure functions, no host sync.

Nodes are rows [..., A]: the logits of their actions, the number of visits of each, and the mean return that followed.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_EPSILON = 1e-8  # minimum range by which values are divided


def puct_scores(
    logits: Tensor, visits: Tensor, q: Tensor, raw_value: Tensor, *, c_init: float, c_base: float
) -> Tensor:
    """Score actions by value and by prior probability.

    Silver et al., "A general reinforcement learning algorithm that masters chess, shogi and Go" (Science, 2018); the
    values are scaled to [0, 1] by the least and greatest of the node, as in Schrittwieser et al., "Mastering Atari, Go,
    chess and shogi by planning with a learned model" (Nature, 2020), appendix B.

    Args:
        logits: of the prior policy; illegal actions have the lowest number of the dtype.  [..., A] float
        visits: number of visits of each action.  [..., A] float
        q: mean return of each action, 0 where it was not taken.  [..., A] float
        raw_value: the model's value of the node.  [...] float
        c_init: weight of the prior.
        c_base: number of visits from which that weight grows.

    Returns:
        [..., A], -inf for actions whose prior probability is 0.
    """
    total = visits.sum(-1, keepdim=True)
    taken = visits > 0
    value = node_value(visits, q, raw_value).unsqueeze(-1)
    completed = torch.where(taken, q, value)
    low, high = torch.minimum(value, completed.amin(-1, True)), torch.maximum(value, completed.amax(-1, True))
    scaled = torch.where(taken, (q - low) / (high - low).clamp(min=_EPSILON), 0.0)
    prior = logits.softmax(-1)
    weight = (c_init + ((total + c_base + 2.0) / c_base).log()) * (total + 1.0).sqrt()
    return (scaled + weight * prior / (visits + 1.0)).masked_fill(prior == 0.0, -torch.inf)


def uct_scores(logits: Tensor, visits: Tensor, q: Tensor, *, c_init: float) -> Tensor:
    """Score actions by upper confidence bounds: Kocsis and Szepesvári, "Bandit based Monte-Carlo planning" (ECML 2006).

    Actions not taken yet come before all others; illegal ones get -inf. Arguments as `puct_scores`, with
    ``q`` in [-1, 1] and ``c_init`` the width of the bounds, in units of the value.
    """
    total = visits.sum(-1, keepdim=True)
    bound = q + c_init * (total.clamp(min=1.0).log() / visits.clamp(min=1.0)).sqrt()
    never = torch.finfo(q.dtype).max
    return torch.where(visits > 0, bound, never).masked_fill(~is_legal(logits), -torch.inf)


def completed_values(
    logits: Tensor, visits: Tensor, q: Tensor, raw_value: Tensor, *, value_scale: float, visit_offset: float
) -> Tensor:
    """Return the values of all actions on the scale of logits; actions not taken yet get the mixed value.

    Danihelka, Guez, Schrittwieser and Silver, "Policy improvement by planning with Gumbel" (ICLR 2022), equation 8 and
    appendix D; ``value_scale`` and ``visit_offset`` are the paper's c_scale and c_visit. Other arguments as
    `puct_scores`.

    Returns:
        [..., A] from 0 to (visit_offset + most visits) * value_scale.
    """
    taken = visits > 0
    prior = logits.softmax(-1).clamp(min=torch.finfo(logits.dtype).tiny)
    total = visits.sum(-1, keepdim=True)
    mass = torch.where(taken, prior, 0.0).sum(-1, keepdim=True)
    weighted = torch.where(taken, prior * q / torch.where(taken, mass, 1.0), 0.0).sum(-1, keepdim=True)
    mixed = (raw_value.unsqueeze(-1) + total * weighted) / (total + 1.0)
    completed = torch.where(taken, q, mixed)
    low, high = completed.amin(-1, True), completed.amax(-1, True)
    scale = (visit_offset + visits.amax(-1, True)) * value_scale
    return scale * (completed - low) / (high - low).clamp(min=_EPSILON)


def gumbel_scores(logits: Tensor, visits: Tensor, values: Tensor) -> Tensor:
    """Score actions so that their visits follow the improved policy; equation 14 of Danihelka et al. (2022).  [..., A].

    ``values`` come from `completed_values`; other arguments as `puct_scores`.
    """
    return (logits + values).softmax(-1) - visits / (1.0 + visits.sum(-1, keepdim=True))


def considered_scores(logits: Tensor, visits: Tensor, values: Tensor, gumbel: Tensor, considered: Tensor) -> Tensor:
    """Score the root's actions for sequential halving: the best among those with the due number of visits.

    Args:
        logits: as in `puct_scores`, as are ``visits``.  [B, A] float
        visits: [B, A] float
        values: from `completed_values`.  [B, A] float
        gumbel: noise that draws the first actions without replacement.  [B, A] float
        considered: the due number of visits, see `considered_visits`; other actions get -inf.  [B] float
    """
    score = (gumbel + (logits - logits.amax(-1, True)) + values).clamp(min=-1e9)
    turn = (visits == considered.unsqueeze(-1)) & is_legal(logits)
    return score.masked_fill(~turn, -torch.inf)


def considered_visits(n_considered: int, n_simulations: int) -> tuple[int, ...]:
    """Plan sequential halving: the number of visits of the actions that are due, simulation by simulation.

    Karnin, Koren and Somekh, "Almost optimal exploration in multi-armed bandits" (ICML 2013), as used in Danihelka et
    al. (2022), section 3: in each of log2(n) phases the remaining actions share an equal part of the simulations, then
    the better half remains, until there are two.

    Args:
        n_considered: number of actions to begin with, at least 1.
        n_simulations: length of the plan.

    >>> considered_visits(4, 8)
    (0, 0, 0, 0, 1, 1, 2, 2)
    """
    if n_considered <= 1:
        return tuple(range(n_simulations))
    n_phases = math.ceil(math.log2(n_considered))
    plan: list[int] = []
    visits, n = 0, n_considered
    while len(plan) < n_simulations:
        for _ in range(max(1, int(n_simulations / (n_phases * n)))):
            plan += [visits] * n
            visits += 1
        n = max(2, n // 2)
    return tuple(plan[:n_simulations])


def node_value(visits: Tensor, q: Tensor, raw_value: Tensor) -> Tensor:
    """Return the mean over a node's own evaluation and all returns that passed through it.  [...]."""
    return (raw_value + (visits * q).sum(-1)) / (1.0 + visits.sum(-1))


def is_legal(logits: Tensor) -> Tensor:
    """Return the mask of legal actions of logits from `mask_logits`.  [..., A] bool."""
    return logits > torch.finfo(logits.dtype).min


def mask_logits(logits: Tensor) -> Tensor:
    """Raise -inf to the lowest number of the dtype, so that softmax is defined even where all actions are illegal.

    The greatest of the others becomes 0.  [..., A] float.
    """
    illegal = logits == -torch.inf
    return (logits - logits.amax(-1, True)).masked_fill_(illegal, torch.finfo(logits.dtype).min)
