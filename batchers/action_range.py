"""Whether agents choose actions that exist: looked at once per batch. Part of rlstruct.batchers.

Many environments raise by themselves. Those that compute with tensors do not: an action beyond the last one is a number
like any other to them, and nobody would notice.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from rlstruct.batchers.slab import Steps
from rlstruct.errors import tag_environment
from rlstruct.spaces import Leaf, leaves


class ActionRange:
    """The range of each action; of a Box only that its numbers are numbers, since environments clip what is beyond.

    On the CPU every batch is looked at, which costs microseconds; elsewhere the first one, since looking waits for the
    device.

    Args:
        space: the action space of one environment.
    """

    def __init__(self, space: spaces.Space[Any]) -> None:
        """Find the ranges."""
        self._ranges = [
            (key, leaf.space, *bounds)
            for key, leaf in leaves(space, "action").items()
            if (bounds := _bounds(leaf)) is not None
        ]
        self._looked = False

    def check(self, steps: Steps, n_steps: int) -> None:
        """Look at the actions of a batch.

        Args:
            steps: the batch.
            n_steps: how many steps of it were taken.

        Raises:
            ValueError: an action does not exist; the error knows its environment.
        """
        if self._looked and not steps.running.is_cpu:
            return
        self._looked = True
        for key, space, low, high in self._ranges:
            actions = steps.action.get(key)
            if actions is None or n_steps == 0:
                continue
            values = actions[:n_steps].cpu().numpy()  # sync: a view of CPU memory; elsewhere in the first batch only
            # The smallest and the largest tell, and NaN makes both NaN: where to look is found after that.
            if np.all(values.min(axis=(0, 1)) >= low) and np.all(values.max(axis=(0, 1)) <= high):
                continue
            running = steps.running[:n_steps].cpu().numpy()  # sync: only when something is wrong
            wrong = ~((values >= low) & (values <= high)).reshape(*running.shape, -1).all(axis=2) & running
            if wrong.any():
                t, j = (int(index) for index in np.argwhere(wrong)[0])
                raise _error(key, space, values[t, j], t, j)


def _error(key: str, space: spaces.Space[Any], value: object, t: int, j: int) -> ValueError:
    mend = "Give the agent's network one output per action"
    if isinstance(space, spaces.Box):
        mend = "Look for NaN in its weights, a learning rate that is too large for example"
    error = ValueError(
        f"agent: action {key!r} of environment {j} in step {t} of the batch is {value}, expected an element of "
        f"{space}. {mend}. The environment took it without a word."
    )
    tag_environment(error, j)
    return error


def _bounds(leaf: Leaf) -> tuple[Any, Any] | None:
    """Least and greatest value; of floating-point Boxes any number, of integer ones nothing is checked."""
    if not isinstance(leaf.space, spaces.Box):
        return leaf.bounds()
    return (-np.inf, np.inf) if leaf.torch_dtype.is_floating_point else None
