"""The agent of soft actor-critic, which samples from a squashed normal distribution, and its networks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Sized
from itertools import pairwise
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from rlstruct.agents.model_agent import ModelAgent
from rlstruct.agents.networks import MLP, Activation, as_features, create_activation, is_size
from rlstruct.core import DictTensor
from rlstruct.errors import BadTypeError, BadValueError
from rlstruct.functional import random, squashed
from rlstruct.policies.blueprint import KeepsArguments
from rlstruct.rl_agent import frame_of

_LOG_STD = -5.0, 2.0  # bounds of the policy's width, as in CleanRL


class Critics(KeepsArguments, nn.Module):
    """N separate networks of action values, computed as one batch of matrices.

    Args:
        n_inputs: D + A, number of entries of a frame and an action.
        hidden: width of each hidden layer.
        n_critics: N.
        activation: see `MLP`.
        layer_norm: normalise the features of each hidden layer before its activation, see `MLP`.
        n_atoms: M, number of returns whose probabilities a network learns (C51: Bellemare, Dabney and Munos, "A
            distributional perspective on reinforcement learning", ICML 2017); with 1 it learns their mean alone.
        value_range: lowest and highest of these returns, which lie at equal distances.

    Raises:
        ValueError: ``n_atoms`` is below 1, or ``value_range`` is missing, not needed, or not two ascending numbers.

    Attributes:
        support: the M returns, ascending; None if M is 1.  [M] float
    """

    support: Any  # mypy cannot tell that `mean` is called only if there is one

    def __init__(
        self,
        n_inputs: int,
        *,
        hidden: Sequence[int] = (256, 256),
        n_critics: int = 2,
        activation: Activation = nn.ReLU,
        layer_norm: bool = False,
        n_atoms: int = 1,
        value_range: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        self.register_buffer("support", _support(n_atoms, value_range), persistent=False)
        self.activation = create_activation(activation)
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for width_in, width_out in pairwise([n_inputs, *hidden, n_atoms]):
            layers = [nn.Linear(width_in, width_out) for _ in range(n_critics)]
            self.weights.append(nn.Parameter(torch.stack([layer.weight.detach() for layer in layers])))
            self.biases.append(nn.Parameter(torch.stack([layer.bias.detach() for layer in layers]).unsqueeze(1)))
        device = torch.get_default_device()
        # Of layer normalisation: factors and summands of each hidden layer.
        self.gains, self.shifts = nn.ParameterList(), nn.ParameterList()
        for width in hidden if layer_norm else ():
            self.gains.append(nn.Parameter(torch.ones(n_critics, 1, width, device=device)))
            self.shifts.append(nn.Parameter(torch.zeros(n_critics, 1, width, device=device)))

    def forward(self, frame: Tensor, action: Tensor, *, constant: bool = False) -> Tensor:
        """Compute action values.

        Args:
            frame: frames of the environments.  [B, ...] any dtype
            action: [B, A] float.
            constant: treat the weights as constants, so gradients reach only the actions.

        Returns:
            Q_n(s, a), the mean of the distribution if there is one.  [N, B]
        """
        outputs = self.outputs(frame, action, constant=constant)
        return outputs.squeeze(-1) if self.support is None else self.mean(outputs.softmax(-1))

    def mean(self, probabilities: Tensor) -> Tensor:
        """Return the mean of distributions over ``support``.  [..., M] to [...]."""
        mean: Tensor = (probabilities * self.support).sum(-1)
        return mean

    def outputs(self, frame: Tensor, action: Tensor, *, constant: bool = False) -> Tensor:
        """Compute the logits of the distributions over ``support``, or values if M is 1; see `forward`.  [N, B, M]."""
        inputs = as_features(frame, self)  # [B, D]
        features = torch.cat([inputs, action.to(inputs.dtype)], dim=-1)  # [B, D + A]
        x, last = features.expand(len(self.weights[0]), -1, -1), len(self.weights) - 1  # [N, B, D + A]
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            weight, bias = (weight.detach(), bias.detach()) if constant else (weight, bias)
            x = torch.baddbmm(bias, x, weight.mT)  # [N, B, width]
            if i < len(self.gains):
                gain, shift = self.gains[i], self.shifts[i]
                gain, shift = (gain.detach(), shift.detach()) if constant else (gain, shift)
                x = torch.addcmul(shift, layer_norm(x, x.shape[-1:]), gain)
            x = x if i == last else self.activation(x)
        return x


class SoftActorCritic(KeepsArguments, nn.Module):
    """The networks of soft actor-critic: a policy, twin critics, and the temperature.

    Args:
        n_inputs: D, the number of entries of a frame, counted over all its axes.
        low: lowest values of the A dimensions of a Box action space.
        high: highest values.
        hidden: width of each hidden layer of every network.
        activation: see `MLP`.
        layer_norm: normalise the features of each hidden layer of every network before its activation, see `MLP`.
        n_atoms: see `Critics`, as is ``value_range``.

    Raises:
        TypeError: a bound is not a sequence.
        ValueError: a bound is not finite, ``low`` is not below ``high``, or see `Critics`.

    Attributes:
        critics: see `Critics`.
        log_temperature: logarithm of the weight of the entropy, alpha.  [] float
        center: middle of the action space.  [A] float
        scale: half its width.               [A] float
        low: least number within the bounds that the dtype of ``scale`` can hold.   [A] float
        high: greatest such number.                                                 [A] float
    """

    center: Tensor
    scale: Tensor
    low: Tensor
    high: Tensor

    def __init__(
        self,
        n_inputs: int,
        low: Sequence[float],
        high: Sequence[float],
        *,
        hidden: Sequence[int] = (256, 256),
        activation: Activation = nn.ReLU,
        layer_norm: bool = False,
        n_atoms: int = 1,
        value_range: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(low, Sized) or not isinstance(high, Sized):
            raise BadTypeError(
                f"SoftActorCritic: low is {low!r} and high {high!r}, expected sequences with a number for each "
                "dimension of the actions. Write low=(-2.0,), high=(2.0,)."
            )
        if len(low) != len(high) or not all(-torch.inf < a < b < torch.inf for a, b in zip(low, high, strict=True)):
            raise BadValueError(
                f"SoftActorCritic: the bounds are {list(low)} and {list(high)}, expected finite ones with low < high. "
                "Bound the actions with gymnasium.wrappers.RescaleAction or ClipAction, or take PPO."
            )
        settings: dict[str, Any] = {"hidden": hidden, "activation": activation, "layer_norm": layer_norm}
        self.actor = MLP(n_inputs, 2 * len(low), orthogonal=False, **settings)
        self.critics = Critics(n_inputs + len(low), n_atoms=n_atoms, value_range=value_range, **settings)
        device = torch.get_default_device()
        self.log_temperature = nn.Parameter(torch.zeros((), device=device))
        bounds = [[*map(float, low)], [*map(float, high)]]
        least, most = torch.tensor(bounds, dtype=torch.float64, device="cpu")  # [A] each; mps has no float64
        parts = {"center": least / 2 + most / 2, "scale": most / 2 - least / 2}
        parts |= {"low": _rounded(least, torch.inf), "high": _rounded(most, -torch.inf)}
        for name, values in parts.items():
            self.register_buffer(name, values.to(device, torch.get_default_dtype()), persistent=False)

    def forward(self, frame: Tensor) -> Tensor:
        """Return the policy for frames [B, ...] of any dtype: mean and log sigma before squashing.  [B, 2 A]."""
        mean, log_std = self.actor(as_features(frame, self)).chunk(2, dim=-1)
        low, high = _LOG_STD
        return torch.cat([mean, low + 0.5 * (high - low) * (torch.tanh(log_std) + 1.0)], dim=-1)


def _support(n_atoms: int, value_range: Sequence[float] | None) -> Tensor | None:
    """Return equidistant returns [M]; None for a single one."""
    if n_atoms == 1 and value_range is None:
        return None
    raw: Any = value_range  # the command line may pass other types
    ends = [*raw] if isinstance(raw, Iterable) else []
    low, high = ends if len(ends) == 2 and all(isinstance(end, Real) for end in ends) else (0.0, 0.0)
    if not is_size(n_atoms) or n_atoms < 2 or not -torch.inf < low < high < torch.inf:
        raise BadValueError(
            f"Critics: n_atoms is {n_atoms} and value_range {value_range}, expected 1 and None, or 2 or more and two "
            "ascending numbers. Let the range span the discounted returns, times reward_scale: n_atoms=101, "
            "value_range=(-20, 20)."
        )
    return torch.linspace(low, high, n_atoms, device=torch.get_default_device())


def _rounded(values: Tensor, towards: float) -> Tensor:
    """Round float64 to the default dtype, towards positive or negative infinity."""
    near = values.to(torch.get_default_dtype())
    beyond = near < values if towards > 0 else near > values
    return torch.where(beyond, torch.nextafter(near, torch.full_like(near, towards)), near)


class SquashedGaussianAgent(ModelAgent[Any]):
    """Agent that samples continuous actions within the bounds of the action space. It keeps no state.

    It returns ``action`` [B, A] and its log-density ``log_probability`` [B], both with gradients. With
    ``agent_info["epsilon"]`` [B] float, that share of the actions is uniform. With ``agent_info["noise"]`` [B] int64 it
    draws from these keys instead of the steps' own, so that equal keys give equal noise. Without ``stochastic`` it
    returns only ``action``, the squashed mean.

    Args:
        model: maps ``frame`` to mean and log sigma [B, 2 A], and has ``center`` and ``scale`` [A] of the actions, and
            ``low`` and ``high`` [A], as `SoftActorCritic` has. Without the last two, rounding may take an action beyond
            a bound.
        device: see `ModelAgent`, as are ``stochastic`` and ``copy_model``.
    """

    pure = True
    action_form = "vector"
    agent_info_on_device = True  # epsilon is compared with random numbers on the device

    def __call__(
        self, state: DictTensor, observation: DictTensor, agent_info: DictTensor, history: object = None
    ) -> tuple[DictTensor, DictTensor]:
        """Act on the frame (see `frame_of`), drawing from ``observation["rng"]``; see `RL_Agent.__call__`."""
        model = self.model
        mean, log_std = model(frame_of(observation)).chunk(2, dim=-1)  # [B, A] each
        if not self.stochastic:
            return DictTensor({"action": self._within_bounds(torch.tanh(mean.detach()))}), state
        key = agent_info["noise"] if "noise" in agent_info else observation["rng"]
        unit, log_probability = squashed.sample_with_log_probability(mean, log_std, key)
        if "epsilon" in agent_info:
            explore = random.uniform(key, stream=0) < agent_info["epsilon"]
            random_unit = 2.0 * random.uniform(key, (mean.shape[-1],)).to(mean.dtype) - 1.0
            unit = torch.where(explore.unsqueeze(-1), random_unit, unit)
            log_probability = log_probability.masked_fill(explore, -mean.shape[-1] * math.log(2.0))
        log_probability = log_probability - model.scale.log().sum()
        return DictTensor({"action": self._within_bounds(unit), "log_probability": log_probability}), state

    def _within_bounds(self, unit: Tensor) -> Tensor:
        """Scale numbers [B, A] from -1..1 to the action space, without leaving it by a rounding."""
        model = self.model
        action: Tensor = model.center + model.scale * unit
        low, high = getattr(model, "low", None), getattr(model, "high", None)
        return action if low is None or high is None else action.clamp(low, high)
