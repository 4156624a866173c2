"""Perceptrons and recurrent networks: frames in, a policy and values out."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence, Set
from itertools import pairwise
from numbers import Integral
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from rlstruct.engine.torch_private import has_hooks
from rlstruct.errors import BadValueError
from rlstruct.functional.recurrence import gated_recurrence
from rlstruct.policies.blueprint import KeepsArguments

if TYPE_CHECKING:
    from rlstruct.agents.convolutional import ConvolutionalTrunk  # imports this module

Activation = str | Callable[[], nn.Module]
"""Function between two layers: a class of torch.nn, or a name of `ACTIVATIONS`."""

ACTIVATIONS: Final[dict[str, Callable[[], nn.Module]]] = {
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "leaky_relu": nn.LeakyReLU,
    "relu": nn.ReLU,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
}
"""Activations by the names that ``--network activation=`` takes; `torch.nn` has others."""


def is_size(value: object) -> bool:
    """Return True for a whole number from 1; the command line may pass other types."""
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= 1


def expect_size(where: str, name: str, value: object, at_least: int = 1) -> None:
    """Raise ValueError unless a size of a network is a whole number."""
    if not is_size(value) and not (value == at_least == 0):
        raise BadValueError(f"{where}: {name} is {value!r}, expected a whole number, {at_least} or more.")


def create_activation(activation: Activation) -> nn.Module:
    """Create the function between two layers.

    Raises:
        ValueError: the activation is neither a class nor a name of `ACTIVATIONS`.
    """
    create = ACTIVATIONS.get(activation) if isinstance(activation, str) else activation
    if not callable(create):
        raise BadValueError(
            f"activation is {activation!r}, expected one of {', '.join(ACTIVATIONS)}; in Python also a class, such as "
            "torch.nn.Mish."
        )
    return create()


class MLP(KeepsArguments, nn.Module):
    """Linear layers with an activation between them.

    Args:
        n_inputs: D, number of input features.
        n_outputs: number of output features.
        hidden: width of each hidden layer.
        activation: function between two layers, a class of torch.nn or a name of `ACTIVATIONS`.
        orthogonal: initialise with orthogonal weights (Saxe, McClelland and Ganguli, ICLR 2014) of gain sqrt(2) and
            zero biases, instead of torch's defaults.
        output_gain: gain of the last layer if ``orthogonal``; with 0.01 a policy starts close to uniform (Andrychowicz
            et al., 2020, section 3.2).
        layer_norm: normalise the features of each hidden layer before its activation (Ba, Kiros and Hinton, "Layer
            normalization", 2016).

    Raises:
        ValueError: a number is not a whole one, the width of a layer is not at least 1, or the activation is unknown.
    """

    def __init__(
        self,
        n_inputs: int,
        n_outputs: int,
        *,
        hidden: Sequence[int] = (64, 64),
        activation: Activation = nn.Tanh,
        orthogonal: bool = True,
        output_gain: float = 1.0,
        layer_norm: bool = False,
    ) -> None:
        super().__init__()
        expect_size("MLP", "n_inputs", n_inputs, at_least=0)
        expect_size("MLP", "n_outputs", n_outputs)
        raw: Any = hidden  # the command line may pass other types
        if not isinstance(raw, Iterable) or isinstance(raw, str | Set) or not all(map(is_size, raw)):
            raise BadValueError(
                f"MLP: hidden is {hidden!r}, expected a sequence of whole numbers, 1 or more: (64, 64)."
            )
        widths = [n_inputs, *hidden]
        layers: list[nn.Module] = []
        for width_in, width_out in pairwise(widths):
            norms = [nn.LayerNorm(width_out)] if layer_norm else []
            layers += [
                _linear(width_in, width_out, 2.0**0.5 if orthogonal else None),
                *norms,
                create_activation(activation),
            ]
        layers.append(_linear(widths[-1], n_outputs, output_gain if orthogonal else None))
        self.layers = nn.Sequential(*layers)

    def forward(self, features: Tensor) -> Tensor:
        """Map features [..., D] float to [..., n_outputs]."""
        output: Tensor = self.layers(features)
        return output


class ActionLogits(nn.Module):
    """Layer that arranges a network's outputs as logits: [B, A] for one choice, [B, K, A] for K choices at once.

    Choices with fewer than A options are padded with -inf, which is never sampled.

    Args:
        n_actions: A of a Discrete action space, or the K sizes of a MultiDiscrete one; ``(2,) * K`` for MultiBinary.
    """

    shape: Final[tuple[int, ...]]
    n_outputs: Final[int]

    def __init__(self, n_actions: int | Sequence[int]) -> None:
        super().__init__()
        raw: Any = n_actions
        if isinstance(raw, Tensor | np.ndarray):
            raw = raw.tolist()  # sync: once, in the constructor
        one = not isinstance(raw, Iterable)
        sizes = [raw] if one else [*raw]
        if not sizes or not all(map(is_size, sizes)):
            raise BadValueError(
                f"ActionLogits: n_actions is {n_actions!r}, expected a whole number, 1 or more, or several. "
                "Pass n of a Discrete space, nvec of a MultiDiscrete one."
            )
        sizes = [int(size) for size in sizes]  # also numbers of numpy, as gymnasium's spaces have them
        self.shape = (sizes[0],) if one else (len(sizes), max(sizes))
        self.n_outputs = math.prod(self.shape)
        device = torch.get_default_device()
        none = torch.arange(self.shape[-1], device=device) >= torch.tensor(sizes, device=device).unsqueeze(1)  # [K, A]
        self._none: Tensor | None
        self.register_buffer("_none", None if one else none, persistent=False)

    def forward(self, outputs: Tensor) -> Tensor:
        """Turn outputs [B, n_outputs] into logits [B, A] or [B, K, A]."""
        logits = outputs.view(-1, *self.shape)
        return logits if self._none is None else logits.masked_fill(self._none, -torch.inf)


class MeanAndDeviation(nn.Module):
    """Layer that appends a learned standard deviation, independent of the frame, to the means of D actions.

    As in Schulman et al., "Trust region policy optimization" (ICML 2015), section 8.

    Args:
        n_dimensions: D, of a Box action space of shape [D].
        initial_log_std: initial logarithm of the standard deviation, in units of the action.
    """

    def __init__(self, n_dimensions: int, initial_log_std: float) -> None:
        super().__init__()
        expect_size("MeanAndDeviation", "n_dimensions", n_dimensions)
        device = torch.get_default_device()
        self.log_std = nn.Parameter(torch.full((n_dimensions,), float(initial_log_std), device=device))

    def forward(self, mean: Tensor) -> Tensor:
        """Turn means [B, D] into means and log sigma [B, 2 D]."""
        return torch.cat([mean, self.log_std.expand_as(mean)], dim=-1)


class ActorCritic(KeepsArguments, nn.Module):
    """A policy and a learned baseline, as two separate networks.

    Args:
        n_inputs: D, the number of entries of a frame, counted over all its axes.
        n_actions: A, or the sizes of K choices, see `ActionLogits`.
        hidden: width of each hidden layer of either network.
        activation: see `MLP`, as are ``orthogonal`` and ``layer_norm``.
    """

    def __init__(
        self,
        n_inputs: int,
        n_actions: int | Sequence[int],
        *,
        hidden: Sequence[int] = (64, 64),
        activation: Activation = nn.Tanh,
        orthogonal: bool = True,
        layer_norm: bool = False,
    ) -> None:
        super().__init__()
        logits = ActionLogits(n_actions)
        self.policy: nn.Module = logits
        settings: dict[str, Any] = {"activation": activation, "orthogonal": orthogonal, "layer_norm": layer_norm}
        self.actor = MLP(n_inputs, logits.n_outputs, hidden=hidden, output_gain=0.01, **settings)
        self.critic = MLP(n_inputs, 1, hidden=hidden, **settings)

    def forward(self, frame: Tensor) -> tuple[Tensor, Tensor]:
        """Compute policy and value.

        Args:
            frame: frames of the environments; integers and bools are converted.  [B, ...] any dtype

        Returns:
            ``(logits, value)``: logits [B, A] or [B, K, A], value [B], both in the dtype of the weights.
        """
        features = as_features(frame, self)  # [B, D]
        return self.policy(self.actor(features)), self.critic(features).squeeze(-1)


class Recurrent(KeepsArguments, nn.Module, ABC):
    """Base of networks with heads on top of one gated recurrent unit (Cho et al., EMNLP 2014).

    Args:
        n_inputs: D, the number of entries of a frame, counted over all its axes; or, for images, a
            `rlstruct.agents.ConvolutionalTrunk`, whose features take the place of the frame.
        n_hidden: H, the size of the recurrent state.
        activation: function of the features that enter the recurrent unit, see `MLP`.
        orthogonal: see `MLP`.
        layer_norm: normalise those features, see `MLP`.
    """

    n_hidden: Final[int]

    def __init__(
        self,
        n_inputs: int | ConvolutionalTrunk,
        *,
        n_hidden: int,
        activation: Activation = nn.Tanh,
        orthogonal: bool = True,
        layer_norm: bool = False,
    ) -> None:
        super().__init__()
        if not is_size(n_hidden):
            raise BadValueError(f"{type(self).__name__}: n_hidden is {n_hidden!r}, expected a whole number from 1.")
        self.n_hidden = n_hidden
        self.trunk: nn.Module = nn.Identity()
        if isinstance(n_inputs, nn.Module):
            self.trunk, n_inputs = n_inputs, n_inputs.n_features
        self.encoder = MLP(n_inputs, n_hidden, hidden=(), orthogonal=orthogonal, output_gain=2.0**0.5)
        self.norm: nn.Module = nn.LayerNorm(n_hidden) if layer_norm else nn.Identity()
        self.activation = create_activation(activation)
        self.memory = nn.GRUCell(n_hidden, n_hidden)

    @abstractmethod
    def heads(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """Compute the outputs from recurrent states [B, H]."""

    def forward(self, frame: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
        """Compute the outputs and the next recurrent state.

        Args:
            frame: frames of the environments.  [B, ...] any dtype
            hidden: the recurrent state.        [B, H] float

        Returns:
            ``(*outputs, new_hidden)``: those of the class, [B, ...] each, and [B, H].
        """
        new_hidden = self.memory(self._features(frame), hidden)
        return *self.heads(new_hidden), new_hidden

    def sequence(self, frame: Tensor, hidden: Tensor, initial: Tensor) -> tuple[Tensor, ...]:
        """Compute what `forward` does for all steps; only the recurrent unit takes one step after the other.

        Args:
            frame: frames of T steps of the environments.         [B, T, ...] any dtype
            hidden: the recurrent state before the first step.    [B, H] float
            initial: True where the state starts anew from zero.  [B, T] bool

        Returns:
            As of `forward`, for step t of row b at b * T + t.  [B * T, ...]
        """
        features = self._features(frame.flatten(0, 1)).view(*initial.shape, -1)  # [B, T, H]
        if type(cell := self.memory) is nn.GRUCell and cell.bias:
            weights = cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh
            states = gated_recurrence(features, hidden, initial, *weights)
        else:
            kept = initial.logical_not().to(features.dtype).unsqueeze(-1)  # [B, T, 1]
            each = []
            for t in range(initial.shape[1]):
                hidden = cell(features[:, t], hidden * kept[:, t])
                each.append(hidden)
            states = torch.stack(each, 1)
        after = states.flatten(0, 1)
        return *self.heads(after), after

    def _features(self, frame: Tensor) -> Tensor:
        features: Tensor = self.activation(self.norm(self.encoder(as_features(self.trunk(frame), self))))
        return features


class RecurrentActorCritic(Recurrent):
    """A policy and a learned baseline on top of one gated recurrent unit; the outputs are logits and value.

    Args:
        n_inputs: see `Recurrent`, as are ``n_hidden``, ``activation``, ``orthogonal`` and ``layer_norm``.
        n_actions: A, or the sizes of K choices, see `ActionLogits`.

    >>> from rlstruct.agents import ConvolutionalTrunk
    >>> model = RecurrentActorCritic(ConvolutionalTrunk((4, 84, 84)), n_actions=6)
    >>> [tuple(output.shape) for output in model(torch.zeros(2, 4, 84, 84), torch.zeros(2, 64))]
    [(2, 6), (2,), (2, 64)]
    """

    def __init__(
        self,
        n_inputs: int | ConvolutionalTrunk,
        n_actions: int | Sequence[int],
        *,
        n_hidden: int = 64,
        activation: Activation = nn.Tanh,
        orthogonal: bool = True,
        layer_norm: bool = False,
    ) -> None:
        settings: dict[str, Any] = {"activation": activation, "orthogonal": orthogonal, "layer_norm": layer_norm}
        super().__init__(n_inputs, n_hidden=n_hidden, **settings)
        logits = ActionLogits(n_actions)
        self.policy: nn.Module = logits
        self.actor = MLP(n_hidden, logits.n_outputs, hidden=(), orthogonal=orthogonal, output_gain=0.01)
        self.critic = MLP(n_hidden, 1, hidden=(), orthogonal=orthogonal)

    def heads(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """Compute logits [B, A] or [B, K, A], and values [B]."""
        return self.policy(self.actor(hidden)), self.critic(hidden).squeeze(-1)


def takes_sequences(model: nn.Module) -> bool:
    """Return True if ``sequence`` of a network does what calling it does: no subclass or hook changes one of them."""
    first = next((base for base in type(model).__mro__ if vars(base).keys() & {"forward", "sequence"}), nn.Module)
    inner = getattr(model, "model", None)  # of a wrapper
    return "sequence" in vars(first) and not has_hooks(model) and (inner is None or takes_sequences(inner))


class GaussianActorCritic(ActorCritic):
    """An `ActorCritic` for D continuous actions: the policy [B, 2 D] is the mean followed by log sigma.

    Args:
        n_inputs: see `ActorCritic`, as are ``hidden``, ``activation``, ``orthogonal`` and ``layer_norm``.
        n_dimensions: D, of a Box action space of shape [D].
        initial_log_std: see `MeanAndDeviation`.
    """

    def __init__(
        self,
        n_inputs: int,
        n_dimensions: int,
        *,
        hidden: Sequence[int] = (64, 64),
        activation: Activation = nn.Tanh,
        orthogonal: bool = True,
        layer_norm: bool = False,
        initial_log_std: float = 0.0,
    ) -> None:
        settings: dict[str, Any] = {"activation": activation, "orthogonal": orthogonal, "layer_norm": layer_norm}
        super().__init__(n_inputs, n_dimensions, hidden=hidden, **settings)
        self.policy = MeanAndDeviation(n_dimensions, initial_log_std)


class RecurrentGaussianActorCritic(RecurrentActorCritic):
    """A `RecurrentActorCritic` for D continuous actions, see `GaussianActorCritic`.

    Args:
        n_inputs: see `RecurrentActorCritic`, as are ``n_hidden``, ``activation``, ``orthogonal`` and ``layer_norm``.
        n_dimensions: D, of a Box action space of shape [D].
        initial_log_std: see `MeanAndDeviation`.
    """

    def __init__(
        self,
        n_inputs: int | ConvolutionalTrunk,
        n_dimensions: int,
        *,
        n_hidden: int = 64,
        activation: Activation = nn.Tanh,
        orthogonal: bool = True,
        layer_norm: bool = False,
        initial_log_std: float = 0.0,
    ) -> None:
        settings: dict[str, Any] = {"activation": activation, "orthogonal": orthogonal, "layer_norm": layer_norm}
        super().__init__(n_inputs, n_dimensions, n_hidden=n_hidden, **settings)
        self.policy = MeanAndDeviation(n_dimensions, initial_log_std)


def as_features(frame: Tensor, model: nn.Module) -> Tensor:
    """Flatten frames and convert them to the dtype of a model's weights, on their own device.

    Args:
        frame: [B, ...] any dtype.
        model: the model that gives the dtype.

    Returns:
        [B, D] in the dtype of the weights; D = 1 for frames of shape [B].
    """
    return frame.reshape(frame.shape[0], -1).to(next(model.parameters()).dtype)


def initialise(layer: nn.Conv2d | nn.Linear, gain: float = 2.0**0.5) -> nn.Conv2d | nn.Linear:
    """Initialise a layer with orthogonal weights and zero biases."""
    nn.init.orthogonal_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def _linear(n_inputs: int, n_outputs: int, gain: float | None) -> nn.Module:
    layer = nn.Linear(n_inputs, n_outputs)
    return layer if gain is None else initialise(layer, gain)
