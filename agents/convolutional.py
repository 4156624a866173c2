"""Networks for images, from frames of pixels to logits and values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any, Final

import torch
from torch import Tensor, nn

from rlstruct.agents.networks import (
    MLP,
    ActionLogits,
    Activation,
    MeanAndDeviation,
    create_activation,
    initialise,
    is_size,
)
from rlstruct.errors import BadValueError
from rlstruct.policies.blueprint import KeepsArguments

Layer = tuple[int, int, int]
"""Filters, kernel size and stride of a convolution."""

MNIH_2015: tuple[Layer, ...] = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
"""Mnih et al., "Human-level control through deep reinforcement learning" (Nature, 2015), for frames of 84 x 84."""

MINATAR: tuple[Layer, ...] = ((16, 3, 1),)
"""Young and Tian, "MinAtar" (2019), for frames of 10 x 10."""

MINIGRID: tuple[Layer, ...] = ((16, 2, 1), (32, 2, 1), (64, 2, 1))
"""The documentation of Minigrid, "Training Minigrid Environments", for the 7 x 7 cells that an agent sees."""

LAYERS: Final[dict[str, tuple[tuple[Layer, ...], int]]] = {
    "atari": (MNIH_2015, 255),
    "minatar": (MINATAR, 255),
    "minigrid": (MINIGRID, 10),  # the largest of its codes, that of the agent
}
"""Convolutions by the names that ``--network layers=`` takes, and the highest byte of their frames."""

_SMALLEST_MNIH_FRAME = 36  # its three convolutions need 36 pixels each way


class ConvolutionalTrunk(KeepsArguments, nn.Module):
    """Convolutions with an activation between them and one dense layer: features of an image.

    Bytes are scaled from 0..``highest`` to 0..1 on the network's device, so a frame is moved as one byte per pixel;
    other dtypes are only converted. Weights start orthogonal with gain sqrt(2), biases at zero.

    Args:
        frame_shape: [C, H, W], or [H, W, C] with ``channels_last``, or [H, W] for one channel.
        n_features: D, width of the dense layer.
        layers: filters, kernel and stride of each convolution, or a name of `LAYERS`; by default `MNIH_2015` for frames
            of 36 x 36 pixels or more, else `MINATAR`.
        channels_last: the channels are the frame's last axis, as in MinAtar. Atari frames stacked by gymnasium have
            them first.
        activation: function after each layer, see `rlstruct.agents.MLP`.
        layer_norm: normalise the features of an image after each layer, before its activation, see
            `rlstruct.agents.MLP`.
        highest: the byte that becomes 1; by default 255, and 10 for the layers "minigrid", whose bytes are codes.

    Raises:
        ValueError: the shape does not have two or three axes, the frame is too small for the convolutions, there are no
            layers of this name, a size is not a whole number from 1, or ``highest`` is not positive.
    """

    frame_shape: Final[tuple[int, ...]]
    highest: Final[int]
    channels_last: Final[bool]
    n_features: Final[int]

    def __init__(
        self,
        frame_shape: Sequence[int],
        *,
        n_features: int = 512,
        layers: Sequence[Layer] | str | None = None,
        channels_last: bool = False,
        activation: Activation = nn.ReLU,
        layer_norm: bool = False,
        highest: int | None = None,
    ) -> None:
        super().__init__()
        self.frame_shape = tuple(frame_shape)
        self.channels_last = channels_last
        self.n_features = n_features
        if len(self.frame_shape) not in (2, 3):
            raise BadValueError(
                f"ConvolutionalTrunk: frame_shape is {list(frame_shape)}, expected [C, H, W], [H, W, C] or [H, W], "
                "without the batch. Merge a stack of frames into its channels first."
            )
        shape = self.frame_shape
        channels, height, width = (1, *shape) if len(shape) == 2 else (shape[2], *shape[:2]) if channels_last else shape
        if layers is None:
            layers = "atari" if min(height, width) >= _SMALLEST_MNIH_FRAME else "minatar"
        if isinstance(layers, str) and layers not in LAYERS:
            raise BadValueError(
                f"ConvolutionalTrunk: layers is {layers!r}, expected one of {', '.join(LAYERS)}, or filters, kernel "
                f"and stride of each convolution, such as {list(map(list, MINATAR))}."
            )
        layers, usual = LAYERS[layers] if isinstance(layers, str) else (layers, 255)
        self.highest = usual if highest is None else highest
        # The command line may pass other types.
        raw: Any = layers
        raw_highest: Any = highest
        if highest is not None and not (isinstance(raw_highest, Real) and highest > 0):
            raise BadValueError(
                f"ConvolutionalTrunk: highest is {highest}, expected the byte that becomes 1, such as 255."
            )
        if not isinstance(raw, Iterable) or not all(
            isinstance(layer, Iterable) and len([*layer]) == 3 and all(map(is_size, layer)) for layer in raw
        ):
            raise BadValueError(
                f"ConvolutionalTrunk: layers is {layers!r}, expected filters, kernel and stride of each convolution, "
                f"whole numbers from 1, such as {list(map(list, MINATAR))}."
            )
        if not is_size(n_features):
            raise BadValueError(f"ConvolutionalTrunk: n_features is {n_features!r}, expected a whole number from 1.")
        modules: list[nn.Module] = []
        size = (height, width)
        for filters, kernel, stride in layers:
            if min(size) < kernel:
                raise BadValueError(
                    f"ConvolutionalTrunk: a kernel of {kernel} does not fit into {size[0]} x {size[1]} pixels, what is "
                    f"left of a frame of shape {list(self.frame_shape)}. Pass other layers=, or set channels_last=."
                )
            size_after = ((size[0] - kernel) // stride + 1, (size[1] - kernel) // stride + 1)
            norms = [nn.LayerNorm((filters, *size_after))] if layer_norm else []
            modules += [initialise(nn.Conv2d(channels, filters, kernel, stride)), *norms, create_activation(activation)]
            channels, size = filters, size_after
        self.convolutions = nn.Sequential(*modules)
        self.dense = initialise(nn.Linear(channels * size[0] * size[1], n_features))
        self.norm: nn.Module = nn.LayerNorm(n_features) if layer_norm else nn.Identity()
        self.activation = create_activation(activation)

    def forward(self, frame: Tensor) -> Tensor:
        """Compute features of frames.

        Args:
            frame: [B, *frame_shape] uint8, bool or float.

        Returns:
            [B, D] in the dtype of the weights.
        """
        pixels = frame.to(self.dense.weight.dtype)
        if frame.dtype is torch.uint8:
            pixels = pixels.mul_(1.0 / self.highest)  # in place: float copies of a batch of pixels are large
        if len(self.frame_shape) == 2:
            pixels = pixels.unsqueeze(1)  # [B, 1, H, W]
        elif self.channels_last:
            pixels = pixels.permute(0, 3, 1, 2)  # [B, C, H, W]
        features: Tensor = self.activation(self.norm(self.dense(self.convolutions(pixels).flatten(1))))  # [B, D]
        return features


class ConvolutionalActorCritic(KeepsArguments, nn.Module):
    """A policy and a learned baseline with a shared trunk (Mnih et al., ICML 2016, section 5.1).

    `rlstruct.agents.ActorCriticAgent` acts with it.

    Args:
        frame_shape: see `ConvolutionalTrunk`, as are ``activation``, ``layer_norm`` and ``highest``.
        n_actions: A, or the sizes of K choices, see `rlstruct.agents.networks.ActionLogits`.
        n_features: width of the layer that policy and baseline share.
        layers: the convolutions.
        channels_last: the channels are the frame's last axis.
    """

    def __init__(
        self,
        frame_shape: Sequence[int],
        n_actions: int | Sequence[int],
        *,
        n_features: int = 512,
        layers: Sequence[Layer] | str | None = None,
        channels_last: bool = False,
        activation: Activation = nn.ReLU,
        layer_norm: bool = False,
        highest: int | None = None,
    ) -> None:
        super().__init__()
        settings: dict[str, Any] = {"layers": layers, "channels_last": channels_last, "activation": activation}
        settings |= {"layer_norm": layer_norm, "highest": highest}
        self.trunk = ConvolutionalTrunk(frame_shape, n_features=n_features, **settings)
        logits = ActionLogits(n_actions)
        self.policy: nn.Module = logits
        self.actor = MLP(n_features, logits.n_outputs, hidden=(), output_gain=0.01)
        self.critic = MLP(n_features, 1, hidden=())

    def forward(self, frame: Tensor) -> tuple[Tensor, Tensor]:
        """Compute policy and value.

        Args:
            frame: [B, *frame_shape] uint8, bool or float.

        Returns:
            ``(logits, value)``: logits [B, A] or [B, K, A], value [B].
        """
        features = self.trunk(frame)
        return self.policy(self.actor(features)), self.critic(features).squeeze(-1)


class ConvolutionalGaussianActorCritic(ConvolutionalActorCritic):
    """A `ConvolutionalActorCritic` for D continuous actions: the policy [B, 2 D] is the mean followed by log sigma.

    `rlstruct.agents.GaussianAgent` acts with it.

    Args:
        frame_shape: see `ConvolutionalActorCritic`, as are ``n_features``, ``layers``, ``channels_last``,
            ``activation``, ``layer_norm`` and ``highest``.
        n_dimensions: D, of a Box action space of shape [D].
        initial_log_std: see `rlstruct.agents.networks.MeanAndDeviation`.

    >>> policy, value = ConvolutionalGaussianActorCritic((3, 96, 96), 3)(torch.zeros(2, 3, 96, 96))
    >>> policy.shape, value.shape
    (torch.Size([2, 6]), torch.Size([2]))
    """

    def __init__(
        self,
        frame_shape: Sequence[int],
        n_dimensions: int,
        *,
        n_features: int = 512,
        layers: Sequence[Layer] | str | None = None,
        channels_last: bool = False,
        activation: Activation = nn.ReLU,
        layer_norm: bool = False,
        highest: int | None = None,
        initial_log_std: float = 0.0,
    ) -> None:
        settings: dict[str, Any] = {"layers": layers, "channels_last": channels_last, "activation": activation}
        settings |= {"layer_norm": layer_norm, "highest": highest}
        super().__init__(frame_shape, n_dimensions, n_features=n_features, **settings)
        self.policy = MeanAndDeviation(n_dimensions, initial_log_std)
