"""Advantages and targets over batches of experience: GAE and V-trace. Pure functions, no host sync.

Rows may hold several episodes, whole or not. The future after step t is worth

- nothing, if the observation after t is terminal;
- the value of the true observation after t, if the episode was truncated there or the row stops
  (Pardo et al., "Time limits in reinforcement learning", ICML 2018);
- the rest of the row from step t + 1 on, otherwise.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rlstruct.errors import BadValueError
from rlstruct.functional.checks import fractions, same_shape
from rlstruct.functional.returns import episode_ends
from rlstruct.functional.scan import backward_recurrence


class VTrace(NamedTuple):
    """Result of `vtrace`.

    Attributes:
        value_target: v_t, the target of the critic.               [B, T]
        advantage: the weight of the gradient of log pi(a_t | s_t).  [B, T]
    """

    value_target: Tensor
    advantage: Tensor


def generalized_advantage(
    reward: Tensor,
    terminated: Tensor,
    done: Tensor,
    mask: Tensor,
    *,
    value: Tensor,
    next_value: Tensor,
    discount: float,
    trace_decay: float,
) -> Tensor:
    """Estimate advantages by GAE(lambda).

    Schulman et al., "High-dimensional continuous control using generalized advantage estimation" (ICLR 2016),
    equations 11 to 16. With lambda = 1 it is the return minus the value, with lambda = 0 the one-step error.

    Args:
        reward: reward received after acting at t.               [B, T] float
        terminated: the observation after t is terminal.         [B, T] bool, same device
        done: the observation after t ended its episode, by termination or truncation.  [B, T] bool
        mask: 1 on real steps, 0 on padding.                     [B, T] float or bool
        value: v(s_t), taken as a constant.                      [B, T] float
        next_value: v of the true observation after t, before any restart; a constant.  [B, T] float
        discount: gamma, in [0, 1].
        trace_decay: lambda, in [0, 1].

    Returns:
        A[b, t] = delta[b, t] + discount * trace_decay * A[b, t + 1], without the second term where the episode or the
        row ends, with delta[b, t] = r[b, t] + discount * next_value[b, t] - value[b, t], where next_value counts as 0
        if terminated; 0 on padding. The target of the critic is A + value.  [B, T], dtype and device of reward
    """
    where = "generalized_advantage"
    fractions(where, discount=discount, trace_decay=trace_decay)
    tensors = {"terminated": terminated, "done": done, "mask": mask, "value": value, "next_value": next_value}
    same_shape(where, temporal=True, reward=reward, **tensors)
    delta = _one_step_target(reward, terminated, mask, next_value, discount) - _real(value, mask, reward)
    return backward_recurrence(delta, _flow(done, mask, discount * trace_decay, reward))


def vtrace(
    reward: Tensor,
    terminated: Tensor,
    done: Tensor,
    mask: Tensor,
    *,
    value: Tensor,
    next_value: Tensor,
    log_ratio: Tensor,
    discount: float,
    trace_decay: float = 1.0,
    rho_clip: float = 1.0,
    c_clip: float = 1.0,
) -> VTrace:
    """Correct targets and advantages for steps that an older policy took.

    Espeholt et al., "IMPALA: scalable distributed deep-RL with importance weighted actor-learner architectures"
    (ICML 2018), equation 1 and section 4.2, with the lambda of its remark 2 in both targets and advantages. Where the
    policies are equal and the clips at least 1, the advantage is GAE(lambda), and the target is the advantage plus the
    value.

    The arguments are those of `generalized_advantage` and:

    * ``log_ratio``: log pi(a_t | s_t) - log mu(a_t | s_t), where pi is the learner's policy and mu the policy that
      acted; taken as a constant.  [B, T] float
    * ``rho_clip``: bound of the weight rho_t = min(rho_clip, pi / mu) of step t itself. It determines whose value is
      estimated: mu's at 0, pi's without a bound.
    * ``c_clip``: bound of the weight c_t = lambda * min(c_clip, pi / mu) of later errors. It determines how fast the
      estimate converges.

    Returns:
        With delta_t = r_t + discount * next_value_t - value_t, where next_value counts as 0 if terminated:
        value_target v_t = value_t + rho_t * delta_t + discount * c_t * (v_{t+1} - value_{t+1}) and
        advantage = rho_t * (delta_t + discount * lambda * (v_{t+1} - value_{t+1})), both without the last term where
        the episode or the row ends; both are 0 on padding.  [B, T], dtype and device of reward
    """
    where = "vtrace"
    fractions(where, discount=discount, trace_decay=trace_decay)
    for name, clip in (("rho_clip", rho_clip), ("c_clip", c_clip)):
        if not clip >= 0.0:
            raise BadValueError(f"{where}: {name} is {clip}, expected at least 0.")
    tensors = {"terminated": terminated, "done": done, "mask": mask, "value": value, "next_value": next_value}
    same_shape(where, temporal=True, reward=reward, log_ratio=log_ratio, **tensors)
    ratio = _real(log_ratio, mask, reward).exp()  # 1 on padding
    rho, c = ratio.clamp(max=rho_clip), trace_decay * ratio.clamp(max=c_clip)
    baseline = _real(value, mask, reward)
    one_step = _one_step_target(reward, terminated, mask, next_value, discount)
    flow = _flow(done, mask, discount, reward)
    correction = backward_recurrence(rho * (one_step - baseline), flow * c)  # v - V
    target = baseline + correction
    following = torch.nn.functional.pad(correction[:, 1:], (0, 1))  # v - V at t + 1, 0 after the last column
    looked_ahead = torch.addcmul(one_step, flow * trace_decay, following)
    return VTrace(target, rho * (looked_ahead - baseline))


def _real(values: Tensor, mask: Tensor, like: Tensor) -> Tensor:
    """Return values as constants in the dtype of ``like``, 0 on padding."""
    return torch.where(mask.bool(), values.detach().to(like.dtype), 0.0)


def _one_step_target(reward: Tensor, terminated: Tensor, mask: Tensor, next_value: Tensor, discount: float) -> Tensor:
    """Return reward + discount * v(s'), with v = 0 after a terminal observation; 0 on padding."""
    following = torch.where(terminated.bool(), 0.0, next_value.detach().to(reward.dtype))
    return torch.where(mask.bool(), reward + discount * following, 0.0)


def _flow(done: Tensor, mask: Tensor, factor: float, like: Tensor) -> Tensor:
    """Return ``factor`` at steps whose episode continues at t + 1 of the row, else 0."""
    goes_on = mask.bool() & ~episode_ends(done, mask)
    return goes_on.to(like.dtype) * factor
