from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gymnasium import spaces
from torch import nn

from rlstruct.agents import MLP, ActorCritic, QNetwork, RecurrentActorCritic, RecurrentQNetwork
from rlstruct.agents.networks import MeanAndDeviation


def test_orthogonal_layers_keep_lengths_up_to_their_gain() -> None:
    layers = [layer for layer in MLP(8, 8, hidden=(8,), output_gain=0.5).layers if isinstance(layer, nn.Linear)]
    for layer, gain in zip(layers, (2.0**0.5, 0.5), strict=True):
        product = layer.weight @ layer.weight.T
        torch.testing.assert_close(product, gain**2 * torch.eye(8), rtol=1e-5, atol=1e-6)
        assert layer.bias.abs().max().item() == 0.0


def test_without_orthogonal_start_the_layers_are_as_torch_makes_them() -> None:
    torch.manual_seed(3)
    network = MLP(4, 2, hidden=(), orthogonal=False)
    torch.manual_seed(3)
    assert torch.equal(network.layers[0].weight, nn.Linear(4, 2).weight)


def test_no_hidden_layer_is_one_linear_map() -> None:
    assert [type(layer) for layer in MLP(4, 2, hidden=()).layers] == [nn.Linear]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool, torch.float16, torch.float64])
def test_frames_of_any_dtype_and_rank_are_taken_as_numbers(dtype: torch.dtype) -> None:
    model = ActorCritic(6, 3)
    frame = torch.tensor([[[0, 1, 1], [1, 0, 1]], [[1, 0, 0], [0, 0, 1]]]).to(dtype)  # [2, 2, 3]
    logits, value = model(frame)
    expected_logits, expected_value = model(frame.to(torch.float32).flatten(1))
    assert logits.shape == (2, 3)
    assert value.shape == (2,)
    torch.testing.assert_close(logits, expected_logits)
    torch.testing.assert_close(value, expected_value)


def test_scalar_frames_are_one_feature() -> None:
    logits, value = ActorCritic(1, 2)(torch.tensor([3, 1, 2]))
    assert (logits.shape, value.shape) == ((3, 2), (3,))


def test_the_first_policy_is_close_to_uniform() -> None:
    logits, _ = ActorCritic(4, 5)(torch.randn(100, 4))
    torch.testing.assert_close(logits.softmax(-1), torch.full((100, 5), 0.2), rtol=0, atol=0.02)


def test_actor_and_critic_share_no_weight() -> None:
    model = ActorCritic(4, 2)
    logits, _ = model(torch.randn(3, 4))
    logits.sum().backward()
    assert all(weight.grad is not None for weight in model.actor.parameters())
    assert all(weight.grad is None for weight in model.critic.parameters())


def test_sizes_that_are_none_are_refused() -> None:
    hidden: Any
    for hidden in (0, (0,), {64}, "64", (True,), (1.5,)):
        with pytest.raises(ValueError, match=r"^MLP: hidden is .*, expected a sequence of whole numbers, 1 or more"):
            MLP(3, 2, hidden=hidden)
    n_hidden: Any
    for n_hidden in (0, 1.5, "4"):
        with pytest.raises(ValueError, match=r"^RecurrentQNetwork: n_hidden is .*, expected a whole number from 1\."):
            RecurrentQNetwork(4, 2, n_hidden=n_hidden)


@pytest.mark.parametrize(
    ("create", "words"),
    [
        (
            lambda: QNetwork(4, spaces.MultiDiscrete([2, 3])),
            r"MLP: n_outputs is MultiDiscrete\(\[2 3\]\), expected a whole",
        ),
        (lambda: QNetwork(4, (2, 3)), r"MLP: n_outputs is \(2, 3\), expected a whole number, 1 or more"),  # type: ignore
        (lambda: MLP(spaces.Box(-1, 1, (4,)), 2), "MLP: n_inputs is Box.*, expected a whole number, 0 or more"),
        (lambda: ActorCritic(4, spaces.Discrete(2)), "n_actions is .* Pass n of a Discrete space, nvec of"),
        (lambda: ActorCritic(4, 2.5), "n_actions is 2.5, expected a whole number"),  # type: ignore[arg-type]
        (
            lambda: ActorCritic(4, torch.tensor([3.0, 2.0])),
            r"n_actions is tensor\(\[3\., 2\.\]\), expected a whole number",
        ),  # type: ignore[arg-type]
        (lambda: ActorCritic(4, ()), r"n_actions is \(\), expected a whole number"),
        (lambda: MeanAndDeviation(1.5, 0.0), "n_dimensions is 1.5, expected a whole"),  # type: ignore[arg-type]
    ],
)
def test_a_space_or_a_float_is_no_number_of_actions(create: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        create()


def test_recurrent_outputs_depend_on_the_hidden_state() -> None:
    model = RecurrentActorCritic(4, 2, n_hidden=8)
    frame = torch.randn(3, 4)
    logits, value, hidden = model(frame, torch.zeros(3, 8))
    assert (logits.shape, value.shape, hidden.shape) == ((3, 2), (3,), (3, 8))
    assert not torch.allclose(model(frame, hidden)[1], value)
