"""What a policy thinks of the actions that were taken, for every kind of action. Layer 4."""

from __future__ import annotations

from torch import Tensor

from rlstruct.core import TemporalDictTensor
from rlstruct.functional import categorical, gaussian


def judge_actions(replayed: TemporalDictTensor, steps: TemporalDictTensor) -> tuple[Tensor, Tensor]:
    """Judge the stored actions, not the replayed ones: with newer weights the same random key may draw another.

    Args:
        replayed: what `rlstruct.replay_agent` returned: ``action_logits`` [B, T, A], or ``action_mean`` and
            ``action_log_std`` [B, T, D].
        steps: what was collected: ``action/action`` [B, T] or [B, T, D], same device.

    Returns:
        ``(log_probability, entropy)`` of the policy at every step, with gradients.  [B, T] each

    Raises:
        KeyError: the agent returns neither.
    """
    if "action_logits" in replayed.keys():
        logits = replayed["action_logits"]
        return categorical.log_probability(logits, steps["action/action"]), categorical.entropy(logits)
    if "action_mean" in replayed.keys():
        mean, log_std = replayed["action_mean"], replayed["action_log_std"]
        return gaussian.log_probability(mean, log_std, steps["action/action"]), gaussian.entropy(log_std)
    raise KeyError(
        f"judge_actions: the agent returns {sorted(replayed.keys())}, expected 'action_logits' (discrete actions) or "
        "'action_mean' and 'action_log_std' (continuous ones). Return them beside 'action'."
    )
