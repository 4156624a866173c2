"""Agents and networks for continuous actions: a diagonal normal distribution, with and without memory. Layer 3."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rlstruct.agents.actor_critic import ActorCriticAgent
from rlstruct.agents.networks import ActorCritic, RecurrentActorCritic
from rlstruct.agents.recurrent import RecurrentAgent
from rlstruct.core import DictTensor
from rlstruct.functional import gaussian


class GaussianActorCritic(ActorCritic):
    """The mean of D continuous actions and a learned baseline, in two networks; the deviation is learned beside them.

    One standard deviation for each action, whatever the frame shows (Schulman et al., "Trust region policy
    optimization", ICML 2015, section 8).

    Args:
        n_inputs: the number of entries of a frame, counted over all its axes.
        n_dimensions: D, of a Box action space of shape [D].
        hidden: width of each hidden layer of either network.
        orthogonal: see `rlstruct.agents.MLP`.
        initial_log_std: logarithm of the standard deviation at the beginning, in units of the action.
    """

    def __init__(
        self,
        n_inputs: int,
        n_dimensions: int,
        *,
        hidden: Sequence[int] = (64, 64),
        orthogonal: bool = True,
        initial_log_std: float = 0.0,
    ) -> None:
        """Build both networks and the deviation."""
        super().__init__(n_inputs, n_dimensions, hidden=hidden, orthogonal=orthogonal)
        self.log_std = _log_std(self, n_dimensions, initial_log_std)

    def forward(self, frame: Tensor) -> tuple[Tensor, Tensor]:
        """Judge frames.

        Args:
            frame: what the environments show.  [B, ...] any dtype

        Returns:
            ``(policy, value)``: policy [B, 2 D] is the mean and beside it log sigma; value [B].
        """
        mean, value = super().forward(frame)
        return _beside(mean, self.log_std), value


class RecurrentGaussianActorCritic(RecurrentActorCritic):
    """As `GaussianActorCritic`, on top of one gated recurrent unit.

    Args:
        n_inputs: the number of entries of a frame, counted over all its axes.
        n_dimensions: D, of a Box action space of shape [D].
        n_hidden: H, the size of the recurrent state.
        orthogonal: see `rlstruct.agents.MLP`.
        initial_log_std: see `GaussianActorCritic`.
    """

    def __init__(
        self,
        n_inputs: int,
        n_dimensions: int,
        *,
        n_hidden: int = 64,
        orthogonal: bool = True,
        initial_log_std: float = 0.0,
    ) -> None:
        """Build the networks and the deviation."""
        super().__init__(n_inputs, n_dimensions, n_hidden=n_hidden, orthogonal=orthogonal)
        self.log_std = _log_std(self, n_dimensions, initial_log_std)

    def forward(self, frame: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Judge frames in the light of what came before.

        Args:
            frame: what the environments show.  [B, ...] any dtype
            hidden: the recurrent state.        [B, H] float

        Returns:
            ``(policy, value, new_hidden)``: [B, 2 D], [B], [B, H].
        """
        mean, value, new_hidden = super().forward(frame, hidden)
        return _beside(mean, self.log_std), value, new_hidden


class _GaussianHead:
    """Overrides how `ActorCriticAgent` and `RecurrentAgent` choose."""

    stochastic: bool

    def choose(self, policy: Tensor, value: Tensor, observation: DictTensor) -> DictTensor:
        """Draw continuous actions; see `gaussian_output`."""
        return gaussian_output(policy, value, observation, self.stochastic)


class GaussianAgent(_GaussianHead, ActorCriticAgent):
    """Draws D continuous actions; keeps no state.

    It returns ``action`` [B, D], ``action_mean`` and ``action_log_std`` [B, D], ``log_probability`` [B] and ``value``
    [B]. Actions are not bounded and not clipped here: the density of what was drawn is what the policy gradient needs.
    Where the environment does not clip them itself, wrap it: ``gymnasium.wrappers.ClipAction``.

    Args:
        model: maps ``frame`` to mean and log sigma [B, 2 D] and value [B], as `GaussianActorCritic` does.
        device: see `rlstruct.agents.model_agent.ModelAgent`, as are ``stochastic`` and ``copy_model``; without
            ``stochastic`` the mean is the action.
    """


class RecurrentGaussianAgent(_GaussianHead, RecurrentAgent):
    """As `GaussianAgent`, with the state of a `RecurrentAgent`.

    Args:
        model: see `RecurrentGaussianActorCritic`.
        device: see `rlstruct.agents.model_agent.ModelAgent`, as are ``stochastic`` and ``copy_model``.
    """


def gaussian_output(policy: Tensor, value: Tensor, observation: DictTensor, stochastic: bool) -> DictTensor:
    """Choose actions and put together what a continuous actor-critic returns.

    Args:
        policy: mean and log sigma side by side.  [B, 2 D] float
        value: the baseline.                      [B] float
        observation: its ``rng`` is drawn from.   [B]
        stochastic: draw, or take the mean.

    Returns:
        ``action`` [B, D], ``action_mean`` [B, D], ``action_log_std`` [B, D], ``log_probability`` [B], ``value`` [B].
    """
    mean, log_std = policy.chunk(2, dim=-1)  # [B, D] each
    action = mean.detach()  # choosing is not differentiable
    if stochastic:
        action = gaussian.sample(action, log_std.detach(), observation["rng"])
    return DictTensor(
        {
            "action": action,
            "action_mean": mean,
            "action_log_std": log_std,
            "log_probability": gaussian.log_probability(mean, log_std, action),
            "value": value,
        }
    )


def _log_std(model: nn.Module, n_dimensions: int, initial: float) -> nn.Parameter:
    return nn.Parameter(torch.full((n_dimensions,), initial, device=next(model.parameters()).device))


def _beside(mean: Tensor, log_std: Tensor) -> Tensor:
    return torch.cat([mean, log_std.expand_as(mean)], dim=-1)  # [B, 2 D]
