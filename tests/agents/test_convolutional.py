from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rlstruct.agents import (
    ConvolutionalActorCritic,
    ConvolutionalGaussianActorCritic,
    ConvolutionalTrunk,
    RecurrentActorCritic,
)
from rlstruct.testing import forbid_host_sync


def convolutions(trunk: ConvolutionalTrunk) -> list[tuple[int, int, int]]:
    layers = [layer for layer in trunk.convolutions if isinstance(layer, nn.Conv2d)]
    return [(layer.out_channels, layer.kernel_size[0], layer.stride[0]) for layer in layers]


def test_atari_frames_get_the_network_of_mnih_2015() -> None:
    trunk = ConvolutionalTrunk((4, 84, 84))
    assert convolutions(trunk) == [(32, 8, 4), (64, 4, 2), (64, 3, 1)]
    assert trunk.dense.in_features == 64 * 7 * 7  # 84 -> 20 -> 9 -> 7
    assert sum(weight.numel() for weight in trunk.parameters()) == 8_224 + 32_832 + 36_928 + 3136 * 512 + 512


def test_small_frames_get_the_network_of_minatar() -> None:
    trunk = ConvolutionalTrunk((10, 10, 4), channels_last=True, n_features=128)
    assert convolutions(trunk) == [(16, 3, 1)]
    assert trunk.dense.in_features == 16 * 8 * 8


def test_bytes_are_scaled_where_they_are_and_never_sync(device: torch.device) -> None:
    trunk = ConvolutionalTrunk((1, 10, 10)).to(device)
    white = torch.full((2, 1, 10, 10), 255, dtype=torch.uint8, device=device)
    with forbid_host_sync():
        from_bytes = trunk(white)
        from_numbers = trunk(torch.ones(2, 1, 10, 10, device=device))
    torch.testing.assert_close(from_bytes, from_numbers)
    assert from_bytes.shape == (2, 512)
    assert (from_bytes > 0).any()


def test_the_axis_of_the_channels_is_read_as_said() -> None:
    first, last = ConvolutionalTrunk((3, 12, 11)), ConvolutionalTrunk((12, 11, 3), channels_last=True)
    last.load_state_dict(first.state_dict())
    frame = torch.rand(2, 3, 12, 11)
    torch.testing.assert_close(first(frame), last(frame.permute(0, 2, 3, 1)))
    flat = ConvolutionalTrunk((12, 11))
    assert flat(torch.rand(2, 12, 11) < 0.5).shape == (2, 512)  # one channel, bool as MinAtar has it


@pytest.mark.parametrize(
    "layers", [[[16, 3, 0]], [[16, 3, -1]], [[0, 3, 1]], [[16, 3]], [16, 3, 1], 16, [["16", 3, 1]], [[16.0, 3, 1]]]
)
def test_layers_that_are_none_are_refused(layers: Any) -> None:
    with pytest.raises(ValueError, match=r"^ConvolutionalTrunk: layers is .*, expected filters, kernel and stride of"):
        ConvolutionalTrunk((10, 10), layers=layers)


def test_other_sizes_that_are_none_are_refused() -> None:
    settings: Any
    for settings in ({"n_features": 0}, {"n_features": 1e2}, {"highest": "abc"}, {"highest": 0}):
        with pytest.raises(ValueError, match=rf"^ConvolutionalTrunk: {next(iter(settings))} is .*, expected"):
            ConvolutionalTrunk((10, 10), **settings)


def test_layers_that_do_not_fit_and_odd_shapes_are_named() -> None:
    with pytest.raises(ValueError, match=r"a kernel of 8 does not fit into 4 x 84 pixels.*channels_last"):
        ConvolutionalTrunk((84, 4, 84), layers=((32, 8, 4),))
    with pytest.raises(ValueError, match=r"frame_shape is \[4, 84, 84, 1\], expected \[C, H, W\]"):
        ConvolutionalTrunk((4, 84, 84, 1))


def test_gradients_reach_every_weight() -> None:
    model = ConvolutionalActorCritic((1, 10, 10), 3, n_features=16)
    logits, value = model(torch.randint(0, 255, (4, 1, 10, 10), dtype=torch.uint8))
    assert (logits.shape, value.shape) == ((4, 3), (4,))
    (logits.square().sum() + value.sum()).backward()
    assert all(weight.grad is not None and weight.grad.abs().max() > 0 for weight in model.parameters())


def test_a_gaussian_policy_on_images_has_deviations_of_its_actions() -> None:
    model = ConvolutionalGaussianActorCritic((10, 10, 3), 2, channels_last=True, n_features=16, initial_log_std=-0.5)
    policy, value = model(torch.randint(0, 255, (4, 10, 10, 3), dtype=torch.uint8))
    mean, log_std = policy.chunk(2, dim=-1)
    assert (mean.shape, value.shape) == ((4, 2), (4,))
    assert mean.abs().max() < 0.1  # the gain of the last layer is 0.01
    assert torch.equal(log_std, torch.full((4, 2), -0.5))
    (mean.square().sum() + log_std.sum() + value.sum()).backward()
    assert all(weight.grad is not None and weight.grad.abs().max() > 0 for weight in model.parameters())


def test_a_recurrent_network_remembers_the_features_of_images() -> None:
    trunk = ConvolutionalTrunk((1, 10, 10), n_features=16)
    model = RecurrentActorCritic(trunk, 3, n_hidden=5)
    frame, hidden = torch.randint(0, 255, (4, 1, 10, 10), dtype=torch.uint8), torch.rand(4, 5)
    logits, value, after = model(frame, hidden)
    assert (logits.shape, value.shape, after.shape) == ((4, 3), (4,), (4, 5))
    torch.testing.assert_close(after, model.memory(model.activation(model.encoder(trunk(frame))), hidden))
    (logits.square().sum() + value.sum()).backward()
    assert all(weight.grad is not None and weight.grad.abs().max() > 0 for weight in trunk.parameters())


def test_a_recurrent_network_of_numbers_keeps_the_names_of_its_weights() -> None:
    """Checkpoints from before there were trunks can be loaded."""
    parts = {name.partition(".")[0] for name in RecurrentActorCritic(4, 2).state_dict()}
    assert parts == {"encoder", "memory", "actor", "critic"}
