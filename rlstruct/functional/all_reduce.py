"""Sums over all learners of a training, so that statistics are those of the whole batch, of which each has a share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from torch import Tensor

_sums: list[Callable[[Tensor], Tensor]] = []  # none while this process learns alone


def sum_over_learners(x: Tensor) -> Tensor:
    """Add up what every learner of this training passes; all of them must call this as often, in the same order.

    Args:
        x: any shape, the same in all learners; without gradients where there are several.

    Returns:
        The sum, in new memory; ``x`` itself where this process learns alone.
    """
    return _sums[-1](x) if _sums else x


@contextlib.contextmanager
def summing_by(add_up: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Let `sum_over_learners` call ``add_up``; `rlstruct.algos.process_group` does."""
    _sums.append(add_up)
    try:
        yield
    finally:
        _sums.pop()
