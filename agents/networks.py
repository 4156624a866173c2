"""Networks of the agents: frames in, logits and values out. Layer 3."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


class MLP(nn.Module):
    """Linear layers with an activation between them.

    Args:
        n_inputs: D, features that come in.
        n_outputs: features that go out.
        hidden: width of each hidden layer.
        activation: what makes the function between two layers.
        orthogonal: start from orthogonal weights (Saxe, McClelland and Ganguli, ICLR 2014) of gain sqrt(2) and from
            zero biases, instead of torch's own initial values.
        output_gain: gain of the last layer if ``orthogonal``; 0.01 makes a policy that starts close to uniform
            (Andrychowicz et al., 2020, section 3.2).
    """

    def __init__(
        self,
        n_inputs: int,
        n_outputs: int,
        *,
        hidden: Sequence[int] = (64, 64),
        activation: Callable[[], nn.Module] = nn.Tanh,
        orthogonal: bool = True,
        output_gain: float = 1.0,
    ) -> None:
        """Build the layers on torch's default device; move them with ``.to``."""
        super().__init__()
        widths = [n_inputs, *hidden]
        layers: list[nn.Module] = []
        for width_in, width_out in pairwise(widths):
            layers += [_linear(width_in, width_out, 2.0**0.5 if orthogonal else None), activation()]
        layers.append(_linear(widths[-1], n_outputs, output_gain if orthogonal else None))
        self.layers = nn.Sequential(*layers)

    def forward(self, features: Tensor) -> Tensor:
        """Map features [..., D] float to [..., n_outputs]."""
        output: Tensor = self.layers(features)
        return output


class ActorCritic(nn.Module):
    """A policy over A actions and a learned baseline, in two networks that share nothing.

    Args:
        n_inputs: D, the number of entries of a frame, counted over all its axes.
        n_actions: A.
        hidden: width of each hidden layer of either network.
        orthogonal: see `MLP`.
    """

    def __init__(
        self, n_inputs: int, n_actions: int, *, hidden: Sequence[int] = (64, 64), orthogonal: bool = True
    ) -> None:
        """Build both networks."""
        super().__init__()
        self.actor = MLP(n_inputs, n_actions, hidden=hidden, orthogonal=orthogonal, output_gain=0.01)
        self.critic = MLP(n_inputs, 1, hidden=hidden, orthogonal=orthogonal)

    def forward(self, frame: Tensor) -> tuple[Tensor, Tensor]:
        """Judge frames.

        Args:
            frame: what the environments show; integers and bools are taken as numbers.  [B, ...] any dtype

        Returns:
            ``(logits, value)``: logits [B, A], value [B], both in the dtype of the weights.
        """
        features = as_features(frame, self)  # [B, D]
        return self.actor(features), self.critic(features).squeeze(-1)


class RecurrentActorCritic(nn.Module):
    """A policy over A actions and a learned baseline on top of one gated recurrent unit (Cho et al., EMNLP 2014).

    Args:
        n_inputs: D, the number of entries of a frame, counted over all its axes.
        n_actions: A.
        n_hidden: H, the size of the recurrent state.
        orthogonal: see `MLP`.
    """

    def __init__(self, n_inputs: int, n_actions: int, *, n_hidden: int = 64, orthogonal: bool = True) -> None:
        """Build the encoder, the recurrent unit and the two heads."""
        super().__init__()
        self.n_hidden = n_hidden
        self.encoder = MLP(n_inputs, n_hidden, hidden=(), orthogonal=orthogonal, output_gain=2.0**0.5)
        self.memory = nn.GRUCell(n_hidden, n_hidden)
        self.actor = MLP(n_hidden, n_actions, hidden=(), orthogonal=orthogonal, output_gain=0.01)
        self.critic = MLP(n_hidden, 1, hidden=(), orthogonal=orthogonal)

    def forward(self, frame: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Judge frames in the light of what came before.

        Args:
            frame: what the environments show.  [B, ...] any dtype
            hidden: the recurrent state.        [B, H] float

        Returns:
            ``(logits, value, new_hidden)``: [B, A], [B], [B, H].
        """
        features = torch.tanh(self.encoder(as_features(frame, self)))  # [B, H]
        new_hidden = self.memory(features, hidden)
        return self.actor(new_hidden), self.critic(new_hidden).squeeze(-1), new_hidden


def as_features(frame: Tensor, model: nn.Module) -> Tensor:
    """Turn frames of any dtype into rows of numbers, on the device where they are.

    Args:
        frame: [B, ...] any dtype.
        model: whose weights give the dtype.

    Returns:
        [B, D] in the dtype of the weights; D = 1 for frames of shape [B].
    """
    return frame.reshape(frame.shape[0], -1).to(next(model.parameters()).dtype)


def _linear(n_inputs: int, n_outputs: int, gain: float | None) -> nn.Linear:
    layer = nn.Linear(n_inputs, n_outputs)
    if gain is not None:
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return layer
