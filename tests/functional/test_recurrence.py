"""A gated recurrent unit at all steps: what torch's cell gives step by step, and its gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from rlstruct.errors import UsageError
from rlstruct.functional.recurrence import gated_recurrence

D = torch.float64
sizes = st.integers(1, 5)


def drawn(b: int, t: int, n_inputs: int, h: int, seed: int) -> tuple[nn.GRUCell, Tensor, Tensor, Tensor]:
    """A cell, its inputs, the state before, and where it starts anew."""
    torch.manual_seed(seed)
    cell = nn.GRUCell(n_inputs, h, dtype=D)
    initial = torch.rand(b, t) < 0.3
    x, hidden = torch.randn(b, t, n_inputs, dtype=D), torch.randn(b, h, dtype=D)
    return cell, x, hidden, initial


def step_by_step(cell: nn.GRUCell, x: Tensor, hidden: Tensor, initial: Tensor) -> Tensor:
    states = []
    for t in range(x.shape[1]):
        hidden = cell(x[:, t], torch.where(initial[:, t].unsqueeze(1), 0.0, hidden))
        states.append(hidden)
    return torch.stack(states, 1)


def weights(cell: nn.GRUCell) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh


@given(b=sizes, t=sizes, n_inputs=sizes, h=sizes, seed=st.integers(0, 1 << 20))
def test_states_and_gradients_are_those_of_single_steps(b: int, t: int, n_inputs: int, h: int, seed: int) -> None:
    cell, x, hidden, initial = drawn(b, t, n_inputs, h, seed)
    leaves = [x.requires_grad_(), hidden.requires_grad_(), *cell.parameters()]
    coefficients = torch.randn(b, t, h, dtype=D)  # of a loss in which every number counts differently
    states, gradients = [], []
    for computed in (gated_recurrence(x, hidden, initial, *weights(cell)), step_by_step(cell, x, hidden, initial)):
        states.append(computed)
        gradients.append(torch.autograd.grad((computed * coefficients).sum(), leaves))
    torch.testing.assert_close(*states, rtol=0, atol=1e-12)
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


def test_gradients_are_differences() -> None:
    cell, x, hidden, initial = drawn(2, 4, 3, 2, 0)
    assert 0 < initial.sum() < 8
    leaves = [x.requires_grad_(), hidden.requires_grad_(), *weights(cell)]
    assert torch.autograd.gradcheck(lambda x, hidden, *rest: gated_recurrence(x, hidden, initial, *rest), leaves)


def test_every_device_computes_the_same(device: torch.device) -> None:
    cell, x, hidden, initial = drawn(3, 6, 2, 4, 1)
    expected = gated_recurrence(x, hidden, initial, *weights(cell))
    there = [value.to(device) for value in (x, hidden, initial, *weights(cell))]
    computed = gated_recurrence(*there)
    assert computed.device == device
    torch.testing.assert_close(computed.cpu(), expected, rtol=0, atol=1e-12)
    gradients = torch.autograd.grad(computed.square().sum(), list(cell.parameters()))
    others = torch.autograd.grad(expected.square().sum(), list(cell.parameters()))
    torch.testing.assert_close(gradients, others, rtol=0, atol=1e-12)


def test_nothing_before_an_episode_has_an_influence() -> None:
    cell, x, hidden, initial = drawn(2, 5, 3, 4, 2)
    initial = initial.zero_()
    initial[1, 2] = True
    states = gated_recurrence(x.requires_grad_(), hidden.requires_grad_(), initial, *weights(cell))
    of_x, of_hidden = torch.autograd.grad(states[:, 2:].sum(), [x, hidden])
    assert of_hidden[0].ne(0).all()
    assert of_x[0].ne(0).all()
    assert of_hidden[1].eq(0).all()
    assert of_x[1, :2].eq(0).all()
    assert of_x[1, 2:].ne(0).all()


def test_traced_it_is_one_operator_for_all_steps() -> None:
    counts = []
    for t in (2, 40):
        cell, x, hidden, initial = drawn(2, t, 3, 4, 3)

        def gradients(initial: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
            x, hidden, *rest = (leaf.detach().requires_grad_() for leaf in leaves)
            states = gated_recurrence(x, hidden, initial, *rest)
            return torch.autograd.grad(states.square().sum(), [x, hidden, *rest])

        leaves = [initial, x, hidden, *weights(cell)]
        graph = make_fx(gradients, tracing_mode="fake")(*leaves)
        names = [str(node.target) for node in graph.graph.nodes]
        assert names.count("rlstruct.gated_recurrence.default") == 1
        assert names.count("rlstruct.gated_recurrence_backward.default") == 1
        torch.testing.assert_close(graph(*leaves), gradients(*leaves), rtol=0, atol=0)
        counts.append(len(names))
    assert counts[0] == counts[1]


def test_a_second_derivative_raises() -> None:
    cell, x, hidden, initial = drawn(1, 2, 1, 1, 4)
    states = gated_recurrence(x.requires_grad_(), hidden, initial, *weights(cell))
    (gradient,) = torch.autograd.grad(states.sum(), x, create_graph=True)
    with pytest.raises(UsageError, match="a second derivative of its states was asked for"):
        torch.autograd.grad(gradient.sum(), x)


def test_shapes_that_do_not_fit_raise() -> None:
    cell, x, hidden, initial = drawn(2, 3, 4, 5, 5)
    with pytest.raises(ValueError, match=r"gated_recurrence: initial is \[2, 2\], expected x \[B, T, D\]"):
        gated_recurrence(x, hidden, initial[:, 1:], *weights(cell))
    with pytest.raises(ValueError, match=r"gated_recurrence: weight_hh is \[12, 4\]"):
        gated_recurrence(x, hidden, initial, cell.weight_ih, torch.zeros(12, 4, dtype=D), cell.bias_ih, cell.bias_hh)
