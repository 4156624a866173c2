"""Optimiser steps that can be skipped on the device, leaving the weights and the optimiser's state unchanged."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adagrad, Adam, AdamW, Optimizer

from rlstruct.engine import torch_private
from rlstruct.engine.host_syncs import intended
from rlstruct.errors import BadTypeError

_FUSED = (Adam, AdamW, Adagrad, torch.optim.SGD)
_OF_THE_DEVICE = ("capturable", "fused", "foreach")  # settings that a checkpoint of another device may not change


@torch.no_grad()
def step_unless(optimizer: Optimizer, held: Tensor) -> None:
    """Take a step, unless ``held`` is true.

    With a fused optimiser of torch on CUDA, or a ``capturable`` one, nothing waits for the device. With others, the
    host reads ``held``. If the very first step of a capturable optimiser is skipped, it initialises its state from
    gradients of 0.

    Args:
        optimizer: any that needs no closure; the weights have their gradients.
        held: on the weights' device.  [] bool

    Raises:
        TypeError: the optimiser is LBFGS, which computes the loss several times in a step.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise BadTypeError(
            "GradientLearner: the optimizer is LBFGS, which computes the loss several times in a step, expected one "
            "that takes a step along a given gradient, such as torch.optim.Adam or RMSprop."
        )
    fused = held.is_cuda and isinstance(optimizer, _FUSED) and _all(optimizer, "fused")
    if fused and not torch_private.missing("fused optimiser"):
        # torch.amp.GradScaler sets the same attribute: the kernel of a fused optimiser then writes nothing.
        optimizer.found_inf = held.to(torch.float32)  # type: ignore[attr-defined]
        optimizer.step()
    elif held.device.type != "cpu" and _all(optimizer, "capturable"):
        _step_and_restore(optimizer, held)
    else:
        with intended():
            skipped = bool(held)  # sync: none on a CPU; elsewhere once per gradient step, the optimiser counts there
        if not skipped:
            optimizer.step()


def initial_rate(optimizer: Optimizer, group: Mapping[str, Any], default: float) -> float:
    """Return the learning rate with which a group of weights was created; ``default`` if none was passed."""
    own = inspect.signature(type(optimizer)).parameters.get("lr")
    rate = float(group["lr"])  # sync: once per optimiser, and only if its rate is a tensor
    return default if own is not None and rate == own.default else rate


def load_optimizer(optimizer: Optimizer, state: Mapping[str, Any], rate: float) -> None:
    """Load a state that may have been saved on another device.

    Args:
        optimizer: to load it into.
        state: of an optimiser of the same class.
        rate: the configuration's learning rate, the initial one in checkpoints of older versions that name none.
    """
    groups = [
        {"initial_lr": rate, **saved, **{name: own[name] for name in _OF_THE_DEVICE if name in own}}
        for saved, own in zip(state["param_groups"], optimizer.param_groups, strict=False)
    ]
    missing = state["param_groups"][len(groups) :]  # torch names the difference
    optimizer.load_state_dict({**state, "param_groups": [*groups, *missing]})


def _step_and_restore(optimizer: Optimizer, held: Tensor) -> None:
    """Take a step, and undo it on the device where ``held`` is true."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"] if weight.grad is not None]
    kept = [*weights, *(x for weight in weights for x in optimizer.state[weight].values() if isinstance(x, Tensor))]
    before = [tensor.clone() for tensor in kept]
    for weight in weights:
        if not optimizer.state[weight]:
            weight.grad = torch.where(held, 0.0, weight.grad)
    optimizer.step()
    torch._foreach_copy_(kept, [torch.where(held, old, new) for old, new in zip(before, kept, strict=True)])


def _all(optimizer: Optimizer, setting: str) -> bool:
    return all(group.get(setting) for group in optimizer.param_groups)


def laid_out_as(weight: Tensor, gradient: Tensor | None) -> Tensor | None:
    """Return the gradient in the memory layout of its weight: fused optimisers on the CPU read both from end to end."""
    if gradient is None or gradient.is_sparse or gradient.stride() == weight.stride():
        return gradient
    return torch.empty_like(weight).copy_(gradient)


def norm_of(gradient: list[Tensor]) -> Tensor:
    """Return the norm of the gradients of all weights together.  []."""
    # Sparse gradients, as of nn.Embedding(sparse=True), have no norm; their values have.
    values = [one.coalesce().values() if one.is_sparse else one for one in gradient]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(values)))
    return norm
