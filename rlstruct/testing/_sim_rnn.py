"""Recurrent cells for the simulated accelerator.

For a device that is not the CPU, torch's C++ asks for fused cells, which have no CPU kernel. They are written here in
ordinary operations, so that autograd differentiates them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from torch import Tensor


def _lstm_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    cx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One step of an LSTM (Hochreiter and Schmidhuber, 1997), gates in torch's order; [B, H] out of [B, 4 H].

    The last result is a workspace that nobody reads.
    """
    gates = input_gates + hidden_gates
    if input_bias is not None and hidden_bias is not None:
        gates = gates + input_bias + hidden_bias
    enter, forget, cell, out = gates.chunk(4, 1)
    cy = forget.sigmoid() * cx + enter.sigmoid() * cell.tanh()
    return out.sigmoid() * cy.tanh(), cy, cx.new_empty(0)


def _gru_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    hx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One step of a GRU (Cho et al., 2014), gates in torch's order; [B, H] out of [B, 3 H].

    The last result is a workspace that nobody reads.
    """
    if input_bias is not None and hidden_bias is not None:
        input_gates, hidden_gates = input_gates + input_bias, hidden_gates + hidden_bias
    input_reset, input_update, input_new = input_gates.chunk(3, 1)
    hidden_reset, hidden_update, hidden_new = hidden_gates.chunk(3, 1)
    update = (input_update + hidden_update).sigmoid()
    new = (input_new + (input_reset + hidden_reset).sigmoid() * hidden_new).tanh()
    return new + update * (hx - new), hx.new_empty(0)


DECOMPOSED: Final[dict[str, Callable[..., Any]]] = {
    "_thnn_fused_lstm_cell": _lstm_cell,
    "_thnn_fused_gru_cell": _gru_cell,
}
