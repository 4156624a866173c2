"""The categorical distribution as functions of logits: no validation of values, so no host sync."""

from __future__ import annotations

import torch
from torch import Tensor

from rlstruct.errors import BadValueError
from rlstruct.functional import random
from rlstruct.functional.checks import axes


def sample(logits: Tensor, key: Tensor) -> Tensor:
    """Draw one class, or K independent ones, for each key: `rlstruct.functional.random.categorical`.

    Args:
        logits: unnormalised log-probabilities; a class at -inf is never drawn.  [B, A] or [B, K, A] float
        key: see `rlstruct.functional.random`.                                   [B] int64

    Returns:
        [B] or [B, K] int64, from 0 to A - 1.
    """
    return random.categorical(logits, key)


def best(scores: Tensor) -> Tensor:
    """Return the class with the highest score in each row; A, which is no class, where one is NaN or all are -inf.

    Args:
        scores: logits or values of actions.  [..., A] float

    Returns:
        [...] int64.

    >>> best(torch.tensor([[0.0, 2.0], [float("nan"), 1.0]]))
    tensor([1, 2])
    """
    highest, index = scores.max(dim=-1)
    return torch.where(highest > -torch.inf, index, scores.shape[-1])


def log_probability(logits: Tensor, action: Tensor) -> Tensor:
    """Return the logarithm of the probability of one action for each row of logits.

    Args:
        logits: unnormalised log-probabilities, -inf for impossible actions.  [..., A] float
        action: the action taken, 0 to A - 1.  [...] int64, same device

    Returns:
        log softmax(logits)[action].  [...], dtype of logits

    Raises:
        ShapeMismatchError: there is not one action for each row of logits.
        ValueError: on the CPU, an action is not from 0 to A - 1.

    >>> log_probability(torch.zeros(1, 2), torch.tensor([1]))
    tensor([-0.6931])
    """
    if action.shape != logits.shape[:-1] or not logits.shape:
        axes("log_probability", logits=(logits, "... A"), action=(action, "..."))
    return _chosen(logits.log_softmax(dim=-1), action)


def entropy(logits: Tensor) -> Tensor:
    """Return the entropy in nats of each row of logits.

    Args:
        logits: unnormalised log-probabilities, -inf for impossible actions.  [..., A] float

    Returns:
        H = -sum_a p(a) log p(a), with 0 log 0 = 0, in [0, log A].  [...], dtype of logits

    >>> entropy(torch.tensor([[0.0, 0.0, -torch.inf]]))
    tensor([0.6931])
    """
    axes("entropy", logits=(logits, "... A"))
    return _entropy(logits.log_softmax(dim=-1))


def log_probability_and_entropy(logits: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """Return `log_probability` and `entropy`, normalising the logits once for both."""
    if action.shape != logits.shape[:-1] or not logits.shape:
        axes("log_probability_and_entropy", logits=(logits, "... A"), action=(action, "..."))
    log_probabilities = logits.log_softmax(dim=-1)
    return _chosen(log_probabilities, action), _entropy(log_probabilities)


def _chosen(log_probabilities: Tensor, action: Tensor) -> Tensor:
    if not action.is_cpu:  # an index out of range would end all work on CUDA, before the batcher can report the action
        action = action.clamp(0, log_probabilities.shape[-1] - 1)
    try:
        return log_probabilities.gather(-1, action.unsqueeze(-1)).squeeze(-1)
    except RuntimeError:
        A = log_probabilities.shape[-1]
        if not bool(((action < 0) | (action >= A)).any()):  # sync: of CPU memory, for an error
            raise
        lowest, highest = int(action.min()), int(action.max())  # sync: as above
        raise BadValueError(
            f"log_probability: actions are {lowest} to {highest}, expected 0 to {A - 1}, as there are logits of {A} "
            "actions. Actions of Discrete(n, start=…) begin with start: subtract it."
        ) from None


def _entropy(log_probabilities: Tensor) -> Tensor:
    # 0 * -inf is nan, in the gradient too: put a finite number where the probability is 0 before multiplying.
    finite = log_probabilities.clamp(min=torch.finfo(log_probabilities.dtype).min)
    return -(log_probabilities.exp() * finite).sum(dim=-1)
