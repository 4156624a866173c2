"""Checks of shapes and plain numbers that read no value of a tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from rlstruct.errors import BadValueError, ShapeMismatchError, UsageError


def same_shape(where: str, *, temporal: bool = False, **tensors: Tensor) -> None:
    """Raise unless all tensors have the same shape, [B, T] if ``temporal``, so that none broadcasts silently."""
    first, expected = next(iter(tensors.items()))
    for name, tensor in tensors.items():
        if tensor.shape != expected.shape or (temporal and tensor.dim() != 2):
            wanted = "[B, T], the same for all; " if temporal else "the same shape for all; "
            raise ShapeMismatchError(
                f"{where}: {name} is {list(tensor.shape)}, expected {wanted}{first} is {list(expected.shape)}. "
                "Squeeze or expand one: broadcasting would average over wrong pairs."
            )


def axes(where: str, **tensors: tuple[Tensor, str]) -> None:
    """Raise unless every tensor has the axes of its form, and axes with the same letter the same size.

    A form is ``"B K A"`` for three axes; ``"... A"`` allows any number of axes before the last; an axis ``1`` has one
    entry.

    >>> axes("entropy", logits=(torch.zeros(4, 2), "... A"), action=(torch.zeros(4), "..."))
    """
    sizes: dict[str, object] = {"1": 1}
    for name, (tensor, form) in tensors.items():
        letters = form.split()
        free = letters[0] == "..."
        n = tensor.dim() - len(letters) + free  # axes before the named ones
        fits = n >= 0 and (free or n == 0)
        if fits:
            lengths = [tensor.shape[:n], *tensor.shape[n:]] if free else [*tensor.shape]
            for letter, size in zip(letters, lengths, strict=True):
                fits = fits and sizes.setdefault(letter, size) == size
        if not fits:
            wanted = "; ".join(f"{key} [{', '.join(one.split())}]" for key, (_, one) in tensors.items())
            shapes = ", ".join(f"{key} {list(one.shape)}" for key, (one, _) in tensors.items())
            raise ShapeMismatchError(
                f"{where}: {name} is {list(tensor.shape)}, expected {wanted}, with the same size for the same letter; "
                f"got {shapes}."
            )


def fractions(where: str, **numbers: float) -> None:
    """Raise ValueError unless all numbers are in [0, 1]."""
    for name, number in numbers.items():
        if not 0.0 <= number <= 1.0:
            raise BadValueError(f"{where}: {name} is {number}, expected 0 to 1.")


def learnable(where: str, **tensors: Tensor) -> None:
    """Raise RuntimeError if gradients are enabled and a tensor has none, since ``backward()`` would not say which."""
    for name, tensor in tensors.items():
        if torch.is_grad_enabled() and not tensor.requires_grad:
            raise UsageError(
                f"{where}: {name} carries no gradient, expected one that leads to the agent's weights. Batches are "
                "collected without: compute it from replay_agent(agent, trajectories). To look at the loss only, use "
                "torch.no_grad()."
            )
