"""A gated recurrent unit over T steps, whose backward pass multiplies matrices of all steps at once.

Cho et al., "Learning phrase representations using RNN encoder-decoder for statistical machine translation", EMNLP 2014.
Only what depends on the step before stays in a loop: one product and a few elementwise operations, into memory that was
allocated once. Traced and compiled code calls the loop as one operator, so compiling takes no longer for more steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from rlstruct.errors import UsageError
from rlstruct.functional.checks import axes


def gated_recurrence(
    x: Tensor, hidden: Tensor, initial: Tensor, weight_ih: Tensor, weight_hh: Tensor, bias_ih: Tensor, bias_hh: Tensor
) -> Tensor:
    """Compute the states of a `torch.nn.GRUCell` at all steps. Can be differentiated once.

    Args:
        x: inputs of the cell.                                    [B, T, D] float
        hidden: the state before the first step.                  [B, H], same dtype
        initial: True where the state starts anew from zero.      [B, T] bool
        weight_ih: the cell's weights of inputs.                  [3 H, D]
        weight_hh: those of the state, for r, z and n in turn.    [3 H, H]
        bias_ih: added to the product of the first.               [3 H]
        bias_hh: added to that of the second.                     [3 H]

    Returns:
        The state after each step.  [B, T, H], dtype and device of hidden

    Raises:
        ValueError: a tensor has another number of axes, or a length that does not fit the others.
        UsageError: in a backward pass, a second derivative is needed.

    >>> cell, x = torch.nn.GRUCell(1, 2), torch.ones(1, 1, 1)
    >>> after = gated_recurrence(x, torch.zeros(1, 2), torch.zeros(1, 1, dtype=torch.bool), *cell.parameters())
    >>> torch.allclose(after[:, 0], cell(x[:, 0]))
    True
    """
    axes(
        "gated_recurrence",
        x=(x, "B T D"), hidden=(hidden, "B H"), initial=(initial, "B T"), weight_ih=(weight_ih, "G D"),
        weight_hh=(weight_hh, "G H"), bias_ih=(bias_ih, "G"), bias_hh=(bias_hh, "G"),
    )  # fmt: skip
    # In the orders n z r of the inputs and z r n of the state, the gradients of either are neighbours in memory.
    of_inputs, of_state = ([value.chunk(3) for value in pair] for pair in ((weight_ih, bias_ih), (weight_hh, bias_hh)))
    n_z_r = [torch.cat([n, z, r]) for r, z, n in of_inputs]
    z_r_n = [torch.cat([z, r, n]) for r, z, n in of_state]
    inputs = linear(x.transpose(0, 1).contiguous(), *n_z_r).to(hidden.dtype)  # [T, B, 3 H]
    kept = initial.t().logical_not().to(hidden.dtype).unsqueeze(2)  # [T, B, 1]
    states, _ = torch.ops.rlstruct.gated_recurrence(inputs, hidden, kept, *z_r_n)
    result: Tensor = states.transpose(0, 1)
    return result


def _forward(inputs: Tensor, hidden: Tensor, kept: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the states, [T, B, H], and the gates, [T, B, 4 H]: z, r, what r multiplies, and the new state n."""
    states, gates = _results(inputs, hidden, kept, weight, bias)
    H, weight = hidden.shape[1], weight.t()
    before = torch.empty_like(hidden)
    z_r, products = gates[:, :, : 2 * H], gates[:, :, : 3 * H]
    views = (inputs[:, :, :H], inputs[:, :, H:], kept, states, products, z_r, *gates.chunk(4, dim=2))
    for input_n, input_zr, keeps, after, product_zrn, zr, z, r, product, n in zip(
        *map(torch.unbind, views), strict=True
    ):
        torch.mul(hidden, keeps, out=before)
        torch.addmm(bias, before, weight, out=product_zrn)
        zr.add_(input_zr).sigmoid_()
        torch.addcmul(input_n, r, product, out=n).tanh_()
        hidden = torch.lerp(n, before, z, out=after)
    return states, gates


def _results(inputs: Tensor, hidden: Tensor, kept: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    T, B, H = *kept.shape[:2], hidden.shape[1]
    return hidden.new_empty(T, B, H), hidden.new_empty(T, B, 4 * H)


def _backward(
    gradient: Tensor, states: Tensor, gates: Tensor, hidden: Tensor, kept: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of inputs, hidden, weight and bias from that of the states."""
    z, r, product, n = gates.chunk(4, dim=2)  # [T, B, H] each
    before = torch.cat([hidden.unsqueeze(0), states[:-1]]).mul_(kept)
    # Derivatives of a state by what n and z are functions of, and those of n by what r is one of, and by the product.
    by_n, by_z = torch.ops.aten.tanh_backward(1 - z, n), torch.ops.aten.sigmoid_backward(before - n, z)
    by_r = torch.ops.aten.sigmoid_backward(product, r)
    inputs, slopes, products = _slopes(gates)
    carried = torch.zeros_like(hidden)
    views = (gradient, z, kept, by_n, by_z, by_r, r, products, *slopes.chunk(4, dim=2))
    steps = list(zip(*map(torch.unbind, views), strict=True))
    for own, keeps_old, keeps, slope_n, slope_z, slope_r, slope_p, of_products, of_n, of_z, of_r, of_p in steps[::-1]:
        carried.add_(own)
        torch.mul(carried, slope_z, out=of_z)
        torch.mul(carried, slope_n, out=of_n)
        torch.mul(of_n, slope_r, out=of_r)
        torch.mul(of_n, slope_p, out=of_p)
        carried.mul_(keeps_old).addmm_(of_products, weight).mul_(keeps)
    flat = products.flatten(0, 1)  # [T * B, 3 H]
    return inputs, carried, flat.t() @ before.flatten(0, 1), flat.sum(0)


def _slopes(gates: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return memory for the gradients of inputs, n z r, of all, n z r product, and of products, z r product."""
    slopes = torch.empty_like(gates)
    H = gates.shape[2] // 4
    return slopes[:, :, : 3 * H], slopes, slopes[:, :, H:]


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:  # noqa: ANN401 - torch's own
    _, hidden, kept, weight, _ = inputs
    states, gates = output
    ctx.mark_non_differentiable(gates)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(states, gates, hidden, kept, weight)


def _differentiate(ctx: Any, gradient: Tensor | None, _: None) -> tuple[Tensor | None, ...]:  # noqa: ANN401
    if gradient is None:
        return (None,) * 5
    of = torch.ops.rlstruct.gated_recurrence_backward(gradient, *ctx.saved_tensors)
    return of[0], of[1], None, of[2], of[3]


def _refuse(ctx: Any, *gradients: Tensor) -> None:  # noqa: ANN401
    raise UsageError(
        "gated_recurrence: a second derivative of its states was asked for, which it does not have. Call the cell step "
        "by step for a loss that contains gradients."
    )


def _gradients(
    gradient: Tensor, states: Tensor, gates: Tensor, hidden: Tensor, kept: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _slopes(gates)[0], torch.empty_like(hidden), torch.empty_like(weight), weight.new_empty(len(weight))


# Not `torch.library.custom_op`, whose first call imports Dynamo, which takes a second.
_library: Any = torch.library.Library("rlstruct", "FRAGMENT")  # type: ignore[no-untyped-call]
_GIVEN = "Tensor hidden, Tensor kept, Tensor weight"
_library.define(f"gated_recurrence(Tensor inputs, {_GIVEN}, Tensor bias) -> (Tensor, Tensor)")
_library.define(
    f"gated_recurrence_backward(Tensor gradient, Tensor states, Tensor gates, {_GIVEN}) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
for _name, _run, _shapes in (
    ("gated_recurrence", _forward, _results),
    ("gated_recurrence_backward", _backward, _gradients),
):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"rlstruct::{_name}", _shapes, lib=_library)
torch.library.register_autograd("rlstruct::gated_recurrence", _differentiate, setup_context=_keep, lib=_library)
torch.library.register_autograd("rlstruct::gated_recurrence_backward", _refuse, lib=_library)
