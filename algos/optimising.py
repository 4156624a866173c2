"""Optimiser steps that can be skipped on the device, leaving the weights and the optimiser's state unchanged."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adagrad, Adam, AdamW, Optimizer

from rlstruct.engine import torch_private
from rlstruct.engine.donated import Donated
from rlstruct.engine.host_syncs import intended
from rlstruct.errors import BadTypeError

Terms = dict[str, Tensor]
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


class PureAdam:
    """Steps of torch's Adam or AdamW as a pure function of tensors, which can be compiled with the gradient.

    Kingma and Ba (ICLR 2015), algorithm 1; Loshchilov and Hutter (ICLR 2019), algorithm 2. The optimiser's state stays
    where torch keeps it; its numbers of steps are true after `count`.

    Args:
        optimizer: one that `supports` returns True for.
        weights: the weights that it may change, which have gradients of the same shapes.
        finite: False if an earlier loss or gradient was not finite, so that no step changes anything.
    """

    def __init__(self, optimizer: Optimizer, weights: Sequence[Tensor], *, finite: bool = True) -> None:
        self._optimizer, self._weights = optimizer, weights
        groups = {id(weight): group for group in optimizer.param_groups for weight in group["params"]}
        self._groups = [groups[id(weight)] for weight in weights]
        self._finite = finite
        self._state = Donated()  # see `state`

    @staticmethod
    def supports(optimizer: Optimizer, weights: Sequence[Tensor]) -> bool:
        """Return True for plain Adam and AdamW of float32 weights, all of which they know."""
        patched = "step" in vars(optimizer) or any(getattr(optimizer, hooks) for hooks in torch_private.STEP_HOOKS)
        optimised = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
        return (
            type(optimizer) in (Adam, AdamW)
            and not patched
            and not any(group[name] for group in optimizer.param_groups for name in ("amsgrad", "maximize"))
            and all(id(weight) in optimised and weight.dtype is torch.float32 for weight in weights)
        )

    def state(self) -> Donated:
        """Return the argument of `compute` for the next step; always the same dict.

        Returns:
            By number of the weight ``weight/0``, the weight itself, its moments ``mean/0`` and ``square/0``. For all
            W weights ``rate`` and ``n_steps``, [W] float64, and ``scales`` of the next step, [W, 2]. ``largest`` [] is
            the largest sum of a loss and a norm, which is not finite once one was not.
        """
        if self._state:
            return self._state
        n_steps = []
        for i, weight in enumerate(self._weights):
            own = self._optimizer.state.get(weight)
            self._state[f"weight/{i}"] = weight.detach()
            self._state[f"mean/{i}"] = own["exp_avg"] if own else torch.zeros_like(weight)
            self._state[f"square/{i}"] = own["exp_avg_sq"] if own else torch.zeros_like(weight)
            with intended():
                n_steps.append(float(own["step"]) if own else 0.0)  # sync: of CPU memory
        device, first = self._weights[0].device, 0.0 if self._finite else torch.inf
        rate = [float(group["lr"]) for group in self._groups]
        self._state["rate"] = torch.tensor(rate, dtype=torch.float64, device=device)
        self._state["n_steps"] = torch.tensor(n_steps, dtype=torch.float64, device=device)
        self._state["scales"] = self._scales(self._state["n_steps"], self._state["rate"])
        self._state["largest"] = torch.full((), first, dtype=torch.float32, device=device)
        return self._state

    def _scales(self, n_steps: Tensor, rate: Tensor) -> Tensor:
        """Return the size of the step that follows ``n_steps``, and the factor of its root.  [W, 2] float32."""
        betas = torch.tensor([group["betas"] for group in self._groups], dtype=torch.float64, device=rate.device)
        correction = 1.0 - betas ** (n_steps + 1.0).unsqueeze(1)
        return torch.stack([rate / correction[:, 0], correction[:, 1].rsqrt()], dim=1).to(torch.float32)

    def compute(self, gradient: Terms, state: Terms, size: Tensor) -> Terms:
        """Compute new weights and moments, ``n_steps``, ``scales`` and ``largest``: a pure function.

        Args:
            gradient: by number of the weight. Weights without one keep their values, and are not in the result.
            state: of `state`.
            size: number that is finite if loss and gradient are; otherwise nothing else changes.  []

        Returns:
            New values by the keys of ``state``.
        """
        largest = torch.maximum(state["largest"], size.detach().abs())  # NaN if either is
        finite = largest < torch.inf
        new = {}
        for i, g in gradient.items():
            before = state[f"weight/{i}"]
            group = self._groups[int(i)]
            decay, square_decay = group["betas"]
            step, root = state["scales"][int(i)].unbind()
            weight = before
            decoupled = group.get("decoupled_weight_decay", type(self._optimizer) is AdamW)
            if (weight_decay := group["weight_decay"]) and decoupled:
                weight = weight * (1.0 - state["rate"][int(i)].to(torch.float32) * weight_decay)
            elif weight_decay:
                g = g + weight_decay * weight
            mean = state[f"mean/{i}"].lerp(g, 1.0 - decay)
            square = square_decay * state[f"square/{i}"] + (1.0 - square_decay) * g * g
            weight = weight - step * mean / (square.sqrt() * root + group["eps"])
            new[f"weight/{i}"] = torch.where(finite, weight, before)
            new[f"mean/{i}"] = torch.where(finite, mean, state[f"mean/{i}"])
            new[f"square/{i}"] = torch.where(finite, square, state[f"square/{i}"])
        moved = [float(str(i) in gradient) for i in range(len(self._weights))]
        n_steps = state["n_steps"] + finite * torch.tensor(moved, dtype=torch.float64, device=largest.device)
        return {**new, "n_steps": n_steps, "scales": self._scales(n_steps, state["rate"]), "largest": largest}

    @torch.no_grad()
    def write(self, new: Terms) -> None:
        """Write the result of `compute` over `state`; compiled code has written most or all of it."""
        for key, value in new.items():
            self._state[key].copy_(value)

    def count(self) -> bool:
        """Pass moments and numbers of steps to the optimiser; return False if a loss or gradient was not finite."""
        if not self._state:
            return self._finite
        with intended():
            n_steps, largest = self._state["n_steps"].tolist(), float(self._state["largest"])  # sync: of CPU memory
        for i, (weight, n) in enumerate(zip(self._weights, n_steps, strict=True)):
            if n > 0.0:
                own = self._optimizer.state[weight]
                own.setdefault("step", torch.zeros((), dtype=torch.float32, device="cpu")).fill_(n)
                own["exp_avg"], own["exp_avg_sq"] = self._state[f"mean/{i}"], self._state[f"square/{i}"]
        return math.isfinite(largest)


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


def loss_plus_norm(terms: Terms, gradient: Terms) -> Tensor:
    """Return a number that is finite only if the loss and the gradient, by number of the weight, are.  []."""
    norm = terms["gradient_norm"] if "gradient_norm" in terms else norm_of(list(gradient.values()))
    return terms["loss"] + norm
