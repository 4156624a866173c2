"""The launch of a game's kernel with a perceptron in it. Part of rlstruct.sims.kernels; see `rlstruct.sims.policy`."""

from __future__ import annotations

import functools
from typing import Any

import torch
import warp as wp

from rlstruct.sims.kernels.advance import make_advance
from rlstruct.sims.kernels.game import GameKernel
from rlstruct.sims.kernels.launching import point
from rlstruct.sims.kernels.memory import make_access, make_memory
from rlstruct.sims.kernels.perceptron import make_perceptron
from rlstruct.sims.kernels.stepper import WarpStepper

__all__ = ["make_policy_launch", "point"]


def make_policy_launch(
    game: GameKernel,
    stepper: WarpStepper,
    n_actions: int,
    width: int,
    n_hidden: int,
    activation: str,
    device: torch.device,
) -> Any:
    """Record a launch whose chooser is a `rlstruct.sims.kernels.perceptron.make_perceptron`.

    Args:
        game: frames are vectors of float32.
        stepper: of the environments.
        n_actions: A.
        width: see `make_perceptron`.
        n_hidden: likewise.
        activation: likewise.
        device: of the environments.
    """
    memory, perceptron, kernel = _make(game, n_actions, width, n_hidden, activation)
    by = perceptron()
    B = stepper.n_envs
    by.rng = wp.from_torch(torch.zeros((1, B), dtype=torch.int64, device=device))
    by.weights = wp.from_torch(torch.zeros((1, 4), dtype=torch.float32, device=device), dtype=wp.vec4f)
    by.logits = wp.from_torch(torch.zeros((1, n_actions, B), dtype=torch.float32, device=device))
    for name in ("log_probability", "value"):
        setattr(by, name, wp.from_torch(torch.zeros((1, B), dtype=torch.float32, device=device)))
    return stepper.record(kernel, memory(), by)


@functools.cache
def _make(game: GameKernel, n_actions: int, width: int, n_hidden: int, activation: str) -> tuple[Any, Any, Any]:
    memory, access = make_memory(game, wp.int64), make_access(game, wp.int64, 0)
    perceptron, choose = make_perceptron(game, access, n_actions, width, n_hidden, activation)
    return memory, perceptron, make_advance(game, memory, access, perceptron, choose)
